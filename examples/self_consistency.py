"""Self-consistency: several ways of reasoning about one question, and the answer that most of them reach."""

from frontend_lang import ProgramResult, State, Vote, gen, program, vote
from radixrt import Engine

WORKED = """Question: Mia has 3 red and 4 blue pens. How many pens has she?
Answer: 3 + 4 = 7. The answer is 7.

Question: A box holds 6 eggs. How many eggs are in 5 boxes?
Answer: 5 * 6 = 30. The answer is 30.

Question: Tom had 12 stamps and gave away 5. How many are left?
Answer: 12 - 5 = 7. The answer is 7.

"""
QUESTION = "A shelf holds 10 books. How many books are on 3 shelves?"
NUM_SAMPLES = 5


@program
def solve(s: State, question: str) -> Vote:
    s += f"{WORKED}Question: {question}\nAnswer:"
    branches = s.fork(NUM_SAMPLES)  # the prompt is computed once for all
    for index, branch in enumerate(branches):
        branch += gen("steps", max_tokens=32, temperature=0.5, seed=index, stop=["The answer", "\n"])
        branch += " The answer is " + gen("number", type=int, max_tokens=6, temperature=0)
    return vote(branches, "number")


def main(engine: Engine) -> ProgramResult[Vote]:
    result = solve.with_options(engine=engine).run(QUESTION)
    print(
        f"{QUESTION} {result.value.value}, say {result.value.share:.0%} of the branches: {result.value.counts}"
    )
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
