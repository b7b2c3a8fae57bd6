"""Tree of thought: propose several steps, rate each, go on from the best. Every level shares the one before it."""

from frontend_lang import ProgramResult, State, gen, program, select
from radixrt import Engine

TASK = "Plan a cheap birthday party for six children in a small flat."
NUM_IDEAS, NUM_KEPT, NUM_STEPS = 3, 2, 2


@program
def plan(s: State, task: str) -> str:
    s += f"Task: {task}\nWe plan in short steps.\n"
    kept = [s]
    for step in range(1, NUM_STEPS + 1):
        thoughts = []
        for state in kept:
            branches = state.fork(NUM_IDEAS)  # all ideas share the plan so far
            for index, branch in enumerate(branches):
                branch += f"Step {step}:" + gen("idea", max_tokens=20, temperature=0.9, seed=index, stop="\n")
                # The rating is asked in a branch of its own, so that it does not stand in the plan.
                (rating,) = branch.fork()
                rating += "\nIs this a good step for the task? Answer:" + select("rating", [" yes", " no"])
                thoughts.append((branch, rating))
        thoughts.sort(key=lambda thought: thought[1].distribution("rating")[" yes"], reverse=True)
        kept = [branch for branch, _ in thoughts[:NUM_KEPT]]
        for state in kept:
            state += "\n"
    return kept[0].text()


def main(engine: Engine) -> ProgramResult[str]:
    result = plan.with_options(engine=engine).run(TASK)
    print(result.value)
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
