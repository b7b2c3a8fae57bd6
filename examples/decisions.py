"""Many decisions about one document: it is computed once, and each question costs its own few tokens."""

from frontend_lang import Decision, ProgramResult, State, choice, decide, predicate, program, score
from radixrt import Engine

LETTER = """From: a guest
We stayed three nights. The room was clean and the bed was good, but the heating did not work and nobody came to
mend it. Breakfast was excellent. We would like our money back for the last night.
"""
QUESTIONS = {
    "wants_refund": predicate("Does the guest want money back?"),
    "broken": choice("What did not work?", ["the bed", "the heating", "the breakfast"]),
    "mood": choice("In which mood is the guest?", ["happy", "mixed", "angry"]),
    "urgency": score("How urgent is it?", range(1, 6)),
}


@program
def read_letter(s: State, letter: str) -> dict[str, Decision[object]]:
    s += f"A letter to a hotel:\n{letter}"
    decisions = decide("decisions", QUESTIONS)
    s += decisions
    return dict(s[decisions])


def main(engine: Engine) -> ProgramResult[dict[str, Decision[object]]]:
    result = read_letter.with_options(engine=engine).run(LETTER)
    for name, decision in result.value.items():
        print(f"{name}: {decision.value} ({decision.probability:.0%})")
    print(f"urgency on average: {result.value['urgency'].mean:.1f}")
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
