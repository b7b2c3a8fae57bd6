"""Branch, solve, merge: judge an essay in several respects side by side, then merge the opinions into a verdict."""

from frontend_lang import ProgramResult, State, assistant, gen, program, select, system, user
from radixrt import Engine

ESSAY = (
    "Trees are useful. They give shade in summer, they hold the soil on a slope, and birds live in them. "
    "A street with trees is cooler than one without. So every town should plant more of them."
)
DIMENSIONS = ["clarity", "evidence", "structure"]


@program
def judge(s: State, essay: str) -> dict[str, str]:
    s += system("You judge short essays. Be brief.")
    s += user(f"Essay: {essay}")

    branches = s.fork(len(DIMENSIONS))  # branch: the essay is computed once
    for branch, dimension in zip(branches, DIMENSIONS, strict=True):  # solve: all at the same time
        branch += user(f"Judge its {dimension} in one sentence.")
        branch += assistant(gen("opinion", max_tokens=30, temperature=0, stop="\n"))
    opinions = {dimension: branch["opinion"] for dimension, branch in zip(DIMENSIONS, branches, strict=True)}

    s += user("Opinions:\n" + "\n".join(opinions.values()) + "\nIs the essay good or bad?")  # merge
    s += assistant("The essay is ", select("verdict", choices=["good", "bad"]))
    return opinions


def main(engine: Engine) -> ProgramResult[dict[str, str]]:
    result = judge.with_options(engine=engine).run(ESSAY)
    for dimension, opinion in result.value.items():
        print(f"{dimension}: {opinion}")
    distribution = result.record("verdict").distribution
    print(f"verdict: {result['verdict']} {distribution}")
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
