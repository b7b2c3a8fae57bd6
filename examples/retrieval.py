"""Answers from retrieved passages: they are put in a fixed order, so that questions about the same ones share them."""

import re

from frontend_lang import Outcome, ProgramResult, State, assistant, cache_table, gen, program, system
from radixrt import Engine

PASSAGES = [
    "The lighthouse of Norvik was built in 1871. It is 38 metres high and stands on a red rock.",
    "Norvik has a school, two bakeries and a harbour. Its ferry leaves at 9 in the morning.",
    "The ferry from Norvik to Sund takes 40 minutes. A ticket costs 12 crowns.",
    "Sund is known for its cheese. The cheese market is open on Saturdays.",
    "The museum of Sund shows old boats. It is closed on Mondays.",
    "A path of 6 kilometres leads from the museum to the northern beach.",
]
QUESTIONS = [
    "How long does the ferry from Norvik to Sund take?",
    "What does a ticket for the ferry from Norvik cost?",
    "When does the ferry leave Norvik?",
    "On which day is the museum of Sund closed?",
]
NUM_PASSAGES = 3


def words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", text.lower()) if len(word) > 2}


def retrieve(question: str) -> list[str]:
    """Find the passages that share most words with a question.

    They come in the order of the collection, not of their score: the same passages are then the same tokens.
    """
    wanted = words(question)
    best = sorted(range(len(PASSAGES)), key=lambda index: (-len(wanted & words(PASSAGES[index])), index))
    return [PASSAGES[index] for index in sorted(best[:NUM_PASSAGES])]


@program
def answer(s: State, question: str) -> str:
    s += system("Answer from the passages only, in one short sentence.")
    with s.user():
        for passage in retrieve(question):
            s += f"- {passage}\n"
        s += f"Question: {question}"
    s += assistant(gen("answer", max_tokens=32, temperature=0, stop="\n"))
    return str(s["answer"])


def main(engine: Engine) -> list[Outcome[ProgramResult[str]]]:
    outcomes = answer.with_options(engine=engine).map([{"question": question} for question in QUESTIONS])
    for question, outcome in zip(QUESTIONS, outcomes, strict=True):
        print(f"{question}\n  {outcome['answer']}")
    print(cache_table(outcomes))
    return outcomes


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
