"""Many decisions about one document: it is computed once, every question is one short branch."""

from frontend_lang import ProgramResult, State, program, select
from radixrt import Engine

DOCUMENT = """From: a guest
We stayed three nights. The room was clean and the bed was good, but the heating did not work and nobody came to
mend it. Breakfast was excellent. We would like our money back for the last night.
"""
DECISIONS = {
    "mood": ("Is the guest happy, mixed or angry?", ["happy", "mixed", "angry"]),
    "refund": ("Does the guest ask for money back?", ["yes", "no"]),
    "topic": ("What is broken?", ["the bed", "the heating", "the breakfast"]),
    "urgency": ("How urgent is it, from 1 to 5?", ["1", "2", "3", "4", "5"]),
}


@program
def decide_all(s: State, document: str) -> dict[str, tuple[str, float]]:
    s += f"A letter to a hotel:\n{document}\n"
    branches = s.fork(len(DECISIONS))
    for branch, (name, (question, choices)) in zip(branches, DECISIONS.items(), strict=True):
        branch += f"Question: {question}\nAnswer: " + select(name, choices)
    decided = {}
    for branch, name in zip(branches, DECISIONS, strict=True):
        decided[name] = (branch[name], branch.distribution(name)[branch[name]])
    return decided


def main(engine: Engine) -> ProgramResult[dict[str, tuple[str, float]]]:
    result = decide_all.with_options(engine=engine).run(DOCUMENT)
    for name, (choice, probability) in result.value.items():
        print(f"{name}: {choice} ({probability:.0%})")
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
