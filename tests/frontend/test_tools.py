"""Typed functions as tools: calls are constrained, checked and run, results follow in the transcript."""

import asyncio
import json
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from frontend_lang import (
    ProgramError,
    ToolAnswer,
    ToolCall,
    ToolFormat,
    assistant,
    describe_tools,
    gen,
    program,
    system,
    user,
)
from frontend_lang.tools import ToolBox
from radixrt import Engine, InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(60)


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Spot(BaseModel):
    city: Literal["Rome", "Bonn"]
    floor: Annotated[int, Field(ge=0, le=9)] = 0


def weather(city: str, unit: Unit = Unit.C, days: int = 1) -> str:
    """Tell the weather of a city.

    More words that the model need not read.
    """
    return f"{city}: 21 {unit.value} for {days} days"


def visit(spot: Spot, times: int) -> dict[str, object]:
    return {"spot": spot, "times": times}


async def clock() -> float:
    await asyncio.sleep(0)
    return 12.5


def broken(x: int) -> int:
    raise ZeroDivisionError("no such number")


def written(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


@program
def once(s, tools, options):
    s += system("You have tools.") + user("Weather in Rome?")
    s += assistant(gen("call", tools=tools, **options))
    s += user("Thanks.")
    return s["call"]


def test_a_call_is_checked_run_and_its_result_follows():
    backend = ScriptedBackend([written("weather", city="Rome", unit="fahrenheit")])
    result = once.with_options(backend=backend).run([weather, visit], {})
    call = result.value
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("weather", {"city": "Rome", "unit": Unit.F, "days": 1})
    assert call.value == call.result == "Rome: 21 fahrenheit for 1 days"
    assert result.messages()[2:] == [
        {
            "role": "assistant",
            "content": f"<tool_call>\n{written('weather', city='Rome', unit='fahrenheit')}\n</tool_call>",
        },
        {"role": "tool", "content": "Rome: 21 fahrenheit for 1 days"},
        {"role": "user", "content": "Thanks."},
    ]
    assert backend.decode(result.token_ids()) == "".join(
        text for text in result.text().replace("<|im_start|>", "").replace("<|im_end|>", "")
    )


def test_plain_text_and_other_formats_hold_results_too():
    @program
    def plain(s):
        s += "Do: " + gen("a", tools=[clock]) + "Then: "
        style = ToolFormat("CALL ", "!", result_before=" -> ", result_after=";")
        s += gen("b", tools=[clock], tool_format=style)
        return s.text()

    text = plain.with_options(backend=ScriptedBackend([written("clock")])).run().value
    assert text == (
        f"Do: <tool_call>\n{written('clock')}\n</tool_call>\n<tool_response>\n12.5\n</tool_response>\nThen: "
        f"CALL {written('clock')}! -> 12.5;"
    )


def test_the_marks_of_a_format_may_be_control_tokens_and_a_result_may_not():
    def posing() -> str:
        return "<|im_end|>"

    @program
    def marked(s):
        style = ToolFormat("<|im_start|>", "<|im_end|>", "parameters", result_before="", result_after="")
        s += "Do: " + gen("a", tools=[posing], tool_format=style)

    backend = ScriptedBackend(['{"name": "posing", "parameters": {}}'])
    ids = marked.with_options(backend=backend).run().token_ids()
    assert (ids.count(2), ids.count(3)) == (1, 1)
    assert '"parameters"' in backend.requests[0].sampling.grammar.text


def test_results_are_text_or_json():
    backend = ScriptedBackend([written("visit", spot={"city": "Bonn"}, times=2)])
    call = once.with_options(backend=backend).run([visit], {}).value
    assert call.value == {"spot": Spot(city="Bonn"), "times": 2}
    assert json.loads(call.result) == {"spot": {"city": "Bonn", "floor": 0}, "times": 2}


def test_a_tool_of_a_dataclass_gets_one():
    @dataclass
    class Point:
        x: int

    def move(to: Point) -> int:
        return to.x

    move.__annotations__["to"] = Point
    backend = ScriptedBackend([written("move", to={"x": 3})])
    assert once.with_options(backend=backend).run([move], {}).value.value == 3


def test_what_a_tool_raises_is_told_to_the_model_or_raised():
    backend = ScriptedBackend([written("broken", x=1)])
    result = once.with_options(backend=backend).run([broken], {})
    assert result.value.result == "error: ZeroDivisionError: no such number"
    assert isinstance(result.value.error, ZeroDivisionError)
    assert result.value.result in result.text()
    with pytest.raises(ProgramError, match=r'gen\("call"\) failed at .*ZeroDivisionError') as caught:
        once.with_options(backend=backend).run([broken], {"on_tool_error": "raise"})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_arguments_that_do_not_fit_fail_before_the_function_runs():
    ran = []

    def careful(x: int) -> None:
        ran.append(x)

    for text in (written("careful", x="many"), written("careful"), written("careful", x=1, y=2)):
        with pytest.raises(ProgramError, match=r'gen\("call"\) failed at .*ValidationError'):
            once.with_options(backend=ScriptedBackend([text])).run([careful], {})
    assert ran == []


def test_rounds_end_with_an_answer_and_are_bounded():
    script = [written("weather", city="Rome"), written("clock"), '{"answer": "Warm."}']
    backend = ScriptedBackend(script)
    result = once.with_options(backend=backend).run([weather, clock], {"max_rounds": 5})
    answer = result.value
    assert isinstance(answer, ToolAnswer)
    assert answer.text == "Warm."
    assert [call.name for call in answer.calls] == ["weather", "clock"]
    roles = [message["role"] for message in result.messages()]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert [call.name for call in result.calls] == ["call"] * 3

    backend = ScriptedBackend(
        lambda request, prompt: (
            written("clock") if "arguments" in request.sampling.grammar.text else script[2]
        )
    )
    result = once.with_options(backend=backend).run([clock], {"max_rounds": 3})
    assert len(result.value.calls) == 3
    assert backend.num_calls == 4


def test_plain_tools_leave_the_loop_and_async_ones_stay_on_it():
    threads = {}

    def plain() -> str:
        threads["plain"] = threading.get_ident()
        return ""

    async def awaited() -> str:
        threads["awaited"] = threading.get_ident()
        return ""

    for tool in (plain, awaited):
        backend = ScriptedBackend([written(tool.__name__)])
        once.with_options(backend=backend).run([tool], {})
    assert threads["awaited"] == threading.get_ident() != threads["plain"]


def test_a_program_goes_on_while_another_ones_tool_waits():
    gate = threading.Event()

    def wait() -> str:
        gate.wait(30)
        return "done"

    def release() -> str:
        gate.set()
        return "released"

    def script(request, prompt):
        return written("wait" if '"wait"' in request.sampling.grammar.text else "release")

    runner = once.with_options(backend=ScriptedBackend(script))
    outcomes = runner.map([([wait], {}), ([release], {})])
    assert [outcome.unwrap().value.result for outcome in outcomes] == ["done", "released"]


def test_functions_that_cannot_be_tools_are_refused_where_they_are_written():
    def untyped(x):
        pass

    def starred(*x: int):
        pass

    def odd(x: threading.Lock):
        pass

    for tool, why in ((untyped, "has no type"), (starred, "passed by name"), (odd, "cannot be a tool")):
        with pytest.raises(InvalidRequest, match=why):
            gen("x", tools=[tool])
    with pytest.raises(InvalidRequest, match="must be a function"):
        gen("x", tools=[5])
    with pytest.raises(InvalidRequest, match="must be a list of functions"):
        gen("x", tools=[])
    with pytest.raises(InvalidRequest, match="distinct names"):
        gen("x", tools=[weather, weather])
    with pytest.raises(InvalidRequest, match="tools cannot be combined with regex"):
        gen("x", tools=[weather], regex="a")
    with pytest.raises(InvalidRequest, match="max_rounds needs tools"):
        gen("x", max_rounds=2)
    with pytest.raises(InvalidRequest, match="max_rounds must be a whole number"):
        gen("x", tools=[weather], max_rounds=0)
    with pytest.raises(InvalidRequest, match="on_tool_error"):
        gen("x", tools=[weather], on_tool_error="ignore")


def test_tools_are_described_by_name_first_line_and_schema():
    lines = describe_tools([weather, clock]).splitlines()
    about = json.loads(lines[1])["function"]
    assert (about["name"], about["description"]) == ("weather", "Tell the weather of a city.")
    assert about["parameters"]["required"] == ["city"]
    assert json.loads(lines[2])["function"]["name"] == "clock"


def test_two_tools_with_models_of_the_same_name_keep_their_own():
    def first() -> None: ...

    def second() -> None: ...

    class Same(BaseModel):
        x: int

    first.__annotations__["spot"] = Spot
    box = ToolBox.of({"tools": [weather, visit]})
    grammar = ToolFormat().grammar(box.tools, can_call=True, can_answer=False)
    definitions = grammar.payload()["$defs"]
    assert set(definitions) == {"weather.Unit", "visit.Spot"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=900, page_size=4, threads=1) as engine:
        yield engine


def test_an_engine_writes_only_calls_that_can_be_run(engine):
    runner = once.with_options(engine=engine, temperature=2.0, max_tokens=120)
    seen = set()
    for seed in range(6):
        call = runner.run([weather, visit, clock], {"seed": seed}).value
        assert call.error is None
        seen.add(call.name)
    assert seen <= {"weather", "visit", "clock"}
    answer = runner.run([clock], {"seed": 1, "max_rounds": 2}).value
    assert len(answer.calls) <= 2
    assert isinstance(answer.text, str)
