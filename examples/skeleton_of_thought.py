"""Skeleton of thought: first the points, then every point written out at the same time."""

from frontend_lang import ProgramResult, State, assistant, gen, program, system, user
from radixrt import Engine

QUESTION = "Why is it good to have trees in a town?"
NUM_POINTS = 3


@program
def explain(s: State, question: str) -> str:
    s += system("You write clear, short answers.")
    s += user(f"{question} List {NUM_POINTS} points, three words each.")
    with s.assistant():
        for number in range(1, NUM_POINTS + 1):
            s += f"{number}." + gen(f"point {number}", max_tokens=8, temperature=0, stop=["\n", "."]) + "\n"
    points = [s[f"point {number}"].strip() for number in range(1, NUM_POINTS + 1)]

    # The branches share the question and the skeleton, so each computes its own few tokens only.
    branches = s.fork(NUM_POINTS)
    for branch, point in zip(branches, points, strict=True):
        branch += user(f"Write one sentence about the point: {point}")
        branch += assistant(gen("sentence", max_tokens=32, temperature=0, stop="\n"))
    return "\n".join(f"{point}: {branch['sentence']}" for point, branch in zip(points, branches, strict=True))


def main(engine: Engine) -> ProgramResult[str]:
    result = explain.with_options(engine=engine).run(QUESTION)
    print(result.value)
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
