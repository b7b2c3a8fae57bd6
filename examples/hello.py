"""The smallest program: a system message, a question, an answer."""

from frontend_lang import ProgramResult, State, assistant, gen, program, system, user
from radixrt import Engine

QUESTION = "What is the capital of France?"


@program
def answer(s: State, question: str) -> None:
    s += system("You are a helpful assistant. Answer in one sentence.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=40, temperature=0))


def main(engine: Engine) -> ProgramResult[None]:
    result = answer.with_options(engine=engine).run(question=QUESTION)
    print(result["answer"])
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
