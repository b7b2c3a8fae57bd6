"""Few-shot word problems in the manner of GSM8K: the worked examples are computed once and shared by every question."""

from frontend_lang import Outcome, ProgramResult, State, cache_table, gen, program
from radixrt import Engine

WORKED = [
    ("Mia has 3 red and 4 blue pens. How many pens has she?", "3 + 4 = 7.", "7"),
    ("A box holds 6 eggs. How many eggs are in 5 boxes?", "5 * 6 = 30.", "30"),
    ("Tom had 12 stamps and gave away 5. How many are left?", "12 - 5 = 7.", "7"),
    ("A rope of 20 m is cut into 4 equal parts. How long is one?", "20 / 4 = 5.", "5"),
    ("Ann reads 9 pages a day. How many in a week?", "A week has 7 days. 7 * 9 = 63.", "63"),
    ("Pears cost 2 dollars, apples 1. What do 3 of each cost?", "3 * 2 = 6. 3 * 1 = 3. 6 + 3 = 9.", "9"),
    ("A bus has 40 seats, 31 are taken. 4 get on. How many are free?", "40 - 31 = 9. 9 - 4 = 5.", "5"),
    ("Leo is 8. His aunt is 4 times as old. How old is she?", "4 * 8 = 32.", "32"),
]
QUESTIONS = [
    "Sam has 5 marbles and finds 3 more. How many has he?",
    "A shelf holds 10 books. How many books are on 3 shelves?",
    "There were 15 birds and 6 flew away. How many stayed?",
    "Four friends share 24 nuts. How many does each get?",
    "A pack has 8 cards. How many cards are in 2 packs?",
    "Eva walks 3 km a day. How far does she walk in 5 days?",
]


@program
def solve(s: State, question: str) -> int:
    for worked, steps, number in WORKED:
        s += f"Question: {worked}\nAnswer: {steps} The answer is {number}.\n\n"
    s += f"Question: {question}\nAnswer:" + gen("steps", max_tokens=40, stop=["The answer", "\n"])
    s += " The answer is " + gen("number", regex=r"[0-9]{1,4}\.", max_tokens=6)
    return int(s["number"].rstrip("."))


def main(engine: Engine) -> list[Outcome[ProgramResult[int]]]:
    run = solve.with_options(engine=engine, temperature=0)
    outcomes = run.map([{"question": question} for question in QUESTIONS])
    for question, outcome in zip(QUESTIONS, outcomes, strict=True):
        print(f"{question}{outcome['steps']} -> {outcome['number']}")
    print(cache_table(outcomes))
    return outcomes


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
