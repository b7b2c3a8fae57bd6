"""Functions that are odd, and still tools; or refused before a model could call them in vain."""

import functools
import json
import os
import threading
import time
import warnings
from typing import TypedDict

import pytest

from frontend_lang import ProgramError, assistant, describe_tools, gen, program, user
from frontend_lang.waiting import MOST_WORKERS
from radixrt import DeadlineExceeded, InvalidRequest
from tests.support.backends import ScriptedBackend

pytestmark = pytest.mark.timeout(60)


def called(function, **arguments):
    backend = ScriptedBackend([json.dumps({"name": function.__name__, "arguments": arguments})])

    @program
    def ask(s):
        s += user("go") + assistant(gen("call", 200, tools=[function]))
        return s["call"]

    return ask.with_options(backend=backend).run().value


def first(items: list[int]) -> int:
    return next(item for item in items if item > 5)


def test_a_tool_that_finds_nothing_next_fails_and_does_not_hang():
    call = called(first, items=[1, 2])
    assert isinstance(call.error, RuntimeError)
    assert isinstance(call.error.__cause__, StopIteration)
    assert call.result == "error: RuntimeError: a function raised StopIteration"
    assert called(first, items=[1, 7]).value == 7


async def twice(x: int) -> int:
    return 2 * x


@functools.wraps(twice)
def decorated(*args, **kwargs):
    return twice(*args, **kwargs)


def test_an_async_function_inside_a_plain_one_is_awaited():
    assert called(decorated, x=4).value == 8


def test_a_generator_function_is_refused_for_it_has_no_one_result():
    def pieces(x: int):
        yield x

    async def later(x: int):
        yield x

    for function in (pieces, later):
        with pytest.raises(InvalidRequest, match="generator function"):
            gen(tools=[function])


def odd_names(schema: int, copy: int, _x: int, model_config: int, json: int = 5) -> list[int]:
    return [schema, copy, _x, model_config, json]


def test_parameters_may_have_any_name_without_a_word_on_the_terminal():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = called(odd_names, schema=1, copy=2, _x=3, model_config=4)
        told = describe_tools([odd_names])
    assert call.value == [1, 2, 3, 4, 5]
    assert call.arguments == {"schema": 1, "copy": 2, "_x": 3, "model_config": 4, "json": 5}
    assert '"required": ["schema", "copy", "_x", "model_config"]' in told
    assert "argument_" not in told


class Spot(TypedDict, total=False):
    city: str


def where(spot: Spot) -> str:
    return spot["city"]


def test_a_typed_dict_of_typing_is_a_parameter_as_it_is_a_schema():
    assert called(where, spot={"city": "Rome"}).value == "Rome"


def test_an_annotation_that_names_nothing_is_refused():
    def lost(x: "Nowhere") -> None:  # noqa: F821
        pass

    with pytest.raises(InvalidRequest, match="lost cannot be a tool: name 'Nowhere' is not defined"):
        gen(tools=[lost])


def odd_name() -> str:
    return os.fsdecode(b"caf\xe9")


def test_a_result_that_is_no_unicode_is_shown():
    call = called(odd_name)  # a file name of another encoding
    assert (call.value, call.result) == ("caf\udce9", r"caf\udce9")


def test_a_deadline_does_not_wait_for_a_tool_that_hangs():
    gate = threading.Event()

    def hang(x: int) -> int:
        gate.wait(30)
        return x

    backend = ScriptedBackend(['{"name": "hang", "arguments": {"x": 1}}'])

    @program
    def ask(s):
        s += user("go") + assistant(gen("call", 200, tools=[hang]))

    runner = ask.with_options(backend=backend, timeout_s=0.2)
    started = time.monotonic()
    try:
        for run in (runner.run, lambda: list(runner.stream())):
            with pytest.raises(ProgramError, match=r'gen\("call"\) failed at .*timeout_s is over') as caught:
                run()
            assert isinstance(caught.value.__cause__, DeadlineExceeded)
    finally:
        gate.set()
    assert time.monotonic() - started < 25
    assert (backend.running, backend.open_scopes) == (0, set())


def test_tools_of_many_programs_share_a_bounded_number_of_threads():
    lock, running, most = threading.Lock(), 0, 0

    def work(x: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return x

    @program
    def ask(s):
        s += user("go") + assistant(gen("call", 200, tools=[work]))
        return s["call"].value

    backend = ScriptedBackend(['{"name": "work", "arguments": {"x": 1}}'])
    outcomes = ask.with_options(backend=backend).map([{}] * 100, max_concurrency=100)
    assert [outcome.unwrap().value for outcome in outcomes] == [1] * 100
    assert 1 < most <= MOST_WORKERS
