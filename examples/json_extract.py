"""Many documents to validated Pydantic objects: the constraint holds token by token, the instructions are shared."""

from typing import Literal

from pydantic import BaseModel, Field

from frontend_lang import Outcome, ProgramResult, State, assistant, cache_table, gen, program, system, user
from radixrt import Engine

DOCUMENTS = [
    "Hello, this is Clara. Please send me 12 large pizzas, as fast as you can!",
    "Omar here. Two small salads, no hurry.",
    "I need 30 medium sandwiches at once. Regards, Mrs Lindqvist",
    "One large soup for Ben, please.",
]


class Order(BaseModel):
    customer: str = Field(max_length=30)
    quantity: int = Field(ge=1, le=999)
    size: Literal["small", "medium", "large"]
    is_express: bool


@program
def extract(s: State, text: str) -> Order:
    s += system("Extract the order as JSON.")
    s += user("This is Ana. I would like 3 small cakes. There is no hurry.")
    s += assistant('{"customer": "Ana", "quantity": 3, "size": "small", "is_express": false}')
    s += user(text)
    order = gen("order", schema=Order, max_tokens=80, temperature=0)
    s += assistant(order)
    return s[order]  # an Order, for the type checker too


def main(engine: Engine) -> list[Outcome[ProgramResult[Order]]]:
    outcomes = extract.with_options(engine=engine).map([{"text": text} for text in DOCUMENTS])
    for text, outcome in zip(DOCUMENTS, outcomes, strict=True):
        print(f"{text}\n  {outcome.unwrap().value!r}")
    print(cache_table(outcomes))
    return outcomes


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
