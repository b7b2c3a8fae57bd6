"""ReAct: think, act, observe. The action is chosen among the tools, its arguments fit the tool's own types."""

import inspect
from typing import Any

from pydantic import create_model

from frontend_lang import ProgramResult, State, gen, program, select
from radixrt import Engine

POPULATIONS = {"France": 68, "Italy": 59, "Spain": 48}  # millions


def population(country: str) -> str:
    """Look up how many million people live in a country."""
    return f"{POPULATIONS[country]} million" if country in POPULATIONS else "unknown country"


def add(left: int, right: int) -> str:
    """Add two whole numbers."""
    return str(left + right)


TOOLS = {tool.__name__: tool for tool in (population, add)}
EXAMPLE = """Question: How many million people live in Spain?
Thought: I need the population of Spain.
Action: population {"country": "Spain"}
Observation: 48 million
Thought: I know the answer now.
Action: finish
Answer: 48 million

"""


def arguments_of(tool: Any) -> Any:
    """Make a Pydantic model of a function's parameters: the schema of its arguments."""
    parameters = inspect.signature(tool).parameters.values()
    return create_model(tool.__name__, **{item.name: (item.annotation, ...) for item in parameters})


@program
def agent(s: State, question: str, max_steps: int = 4) -> str:
    s += "Answer the question with these tools.\n"
    for tool in TOOLS.values():
        s += f"{tool.__name__}{inspect.signature(tool)}: {tool.__doc__}\n"
    s += f"\n{EXAMPLE}Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + gen("thought", max_tokens=24, stop="\n")
        s += "\nAction: " + select("action", [*TOOLS, "finish"])
        if s["action"] == "finish":
            break
        tool = TOOLS[s["action"]]
        s += " " + gen("arguments", schema=arguments_of(tool), max_tokens=32)
        s += f"\nObservation: {tool(**s['arguments'].model_dump())}\n"
    s += "\nAnswer:" + gen("answer", max_tokens=16, stop="\n")
    return str(s["answer"]).strip()


def main(engine: Engine) -> ProgramResult[str]:
    result = agent.with_options(engine=engine, temperature=0).run(
        "How many million people live in France and Italy?"
    )
    print(result.text()[result.text().rindex("Question:") :])
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
