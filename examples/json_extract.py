"""Text to a validated Pydantic object: the constraint holds token by token."""

from typing import Literal

from pydantic import BaseModel, Field

from frontend_lang import ProgramResult, State, assistant, gen, program, system, user
from radixrt import Engine


class Order(BaseModel):
    customer: str = Field(max_length=30)
    quantity: int = Field(ge=1, le=999)
    size: Literal["small", "medium", "large"]
    is_express: bool


@program
def extract(s: State, text: str) -> Order:
    s += system("Extract the order as JSON.")
    s += user(text)
    s += assistant(gen("order", schema=Order, max_tokens=80, temperature=0))
    order: Order = s["order"]
    return order


def main(engine: Engine) -> ProgramResult[Order]:
    result = extract.with_options(engine=engine).run(
        "Hello, this is Clara. Please send me 12 large pizzas, as fast as you can!"
    )
    print(repr(result.value))
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
