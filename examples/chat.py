"""A conversation: every turn extends the last one's tokens, so only the new message is computed."""

from frontend_lang import ProgramResult, State, assistant, gen, program, system, user
from radixrt import Engine

QUESTIONS = [
    "Name a planet with rings.",
    "Is it larger than the Earth?",
    "Thank you. Say goodbye in three words.",
]


@program
def converse(s: State, questions: list[str]) -> list[str]:
    s += system("You are a friendly astronomer. Be brief.")
    answers = []
    for question in questions:
        s += user(question)
        s += assistant(gen("answer", max_tokens=40, temperature=0))
        answers.append(s["answer"])
    return answers


def main(engine: Engine) -> ProgramResult[list[str]]:
    result = converse.with_options(engine=engine).run(QUESTIONS)
    for message in result.messages():
        print(f"{message['role']}: {message['content']}")
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
