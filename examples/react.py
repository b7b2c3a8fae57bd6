"""ReAct: think, act, observe. What the model may write as an action is limited to calls of typed Python functions."""

from frontend_lang import ProgramResult, State, ToolFormat, describe_tools, gen, program
from radixrt import Engine

POPULATIONS = {"France": 68, "Italy": 59, "Spain": 48}  # millions


def population(country: str) -> str:
    """Look up how many million people live in a country."""
    return f"{POPULATIONS[country]} million"  # an unknown country is told to the model as an error


def add(left: int, right: int) -> int:
    """Add two whole numbers."""
    return left + right


def finish(answer: str) -> str:
    """Give the answer to the question."""
    return answer


QUESTION = "How many million people live in France?"
TOOLS = (population, add, finish)
# How a call and its result stand in the transcript: a line each.
LINES = ToolFormat(before="Action: ", after="", result_before="\nObservation: ", result_after="\n")
EXAMPLE = """Question: How many million people live in Spain?
Thought: I need the population of Spain.
Action: {"name": "population", "arguments": {"country": "Spain"}}
Observation: 48 million
Thought: I know the answer now.
Action: {"name": "finish", "arguments": {"answer": "48 million"}}

"""


@program
def agent(s: State, question: str, max_steps: int = 4) -> str | None:
    s += f"{describe_tools(TOOLS)}\n\n{EXAMPLE}Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + gen("thought", max_tokens=24, stop="\n") + "\n"
        call = gen("call", tools=TOOLS, tool_format=LINES, max_tokens=48)
        s += call
        if s[call].name == "finish":  # a ToolCall: the name, the typed arguments, what the function gave
            return str(s[call].value)
    return None


def main(engine: Engine) -> ProgramResult[str | None]:
    result = agent.with_options(engine=engine, temperature=0).run(QUESTION)
    print(result.text()[result.text().rindex("Question:") :])
    print(result.table())
    return result


if __name__ == "__main__":
    with Engine() as engine:
        main(engine)
