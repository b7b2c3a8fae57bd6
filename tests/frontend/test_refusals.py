"""Nothing that a caller gives is dropped in silence: a second name of an option, a wrong function."""

import functools
from pathlib import Path

import pytest

from frontend_lang import (
    function,
    gen,
    greedy_token_selection,
    program,
    select,
    set_default_engine,
    token_length_normalized,
)
from radixrt import InvalidRequest
from tests.support.backends import ScriptedBackend


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"dtype": int, "type": str}, "dtype"),
        ({"json_schema": "{}", "schema": {}}, "json_schema"),
        ({"logprobs": 3, "return_logprob": True}, "return_logprob"),
        ({"logprobs": 3, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_logprob": False, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_logprob": "no"}, "return_logprob"),
        ({"json_schema": "{bad"}, "json_schema"),
    ],
)
def test_an_option_under_two_names_or_without_meaning_is_refused(options, parameter):
    with pytest.raises(InvalidRequest) as caught:
        gen("x", 5, **options)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("method", ["token_length_normalised", "greedy_token"])
def test_a_method_under_two_names_is_refused(method):
    with pytest.raises(InvalidRequest, match="choices_method is another name of method"):
        select("x", ["a", "b"], method=method, choices_method=greedy_token_selection)
    for one_name in ({"method": method}, {"choices_method": method}):
        assert select("x", ["a", "b"], **one_name).method == method
    assert select("x", ["a", "b"]).method == token_length_normalized


def test_run_batch_takes_one_name_of_its_limit():
    @function
    def one(s):
        s += gen("x")

    runner = one.with_options(backend=ScriptedBackend())
    with pytest.raises(TypeError, match="num_threads is another name of max_concurrency"):
        runner.run_batch([{}], num_threads=3, max_concurrency=2)


def test_run_takes_one_name_of_max_tokens():
    @function
    def one(s):
        s += gen("x")

    runner = one.with_options(backend=ScriptedBackend())
    with pytest.raises(TypeError, match="max_new_tokens is another name of max_tokens"):
        runner.run(max_new_tokens=3, max_tokens=5)


class Callable:
    def __call__(self, s):
        s += gen("x")

    def method(self, s):
        s += gen("x")


@pytest.mark.parametrize(
    "wrong", [Callable(), functools.partial(Callable.method, None), print, "text", Callable]
)
def test_only_functions_and_methods_can_be_programs(wrong):
    with pytest.raises(TypeError, match="a program is made of a function or method, got"):
        program(wrong)


def test_a_method_is_a_program():
    assert program(Callable().method).with_options(backend=ScriptedBackend()).run()["x"] == "ok"


def test_outcomes_can_be_printed_and_printing_tells_nobody():
    @program
    def forked(s):
        branches = s.fork(2)
        branches += gen("x")
        shown = repr(branches.join())
        assert shown.startswith("Outcomes([Ok(value=State(")
        assert "Err(error=" in shown

    with pytest.raises(Exception, match="the engine died"):  # printing is not handling
        forked.with_options(backend=ScriptedBackend(fail_at={1})).run()


@pytest.mark.parametrize("engine", ["smollm2-135m", Path("some") / "model.gguf"])
def test_the_name_of_a_model_is_no_engine(engine):
    @program
    def answer(s):
        s += gen("x")

    with pytest.raises(TypeError, match=r"radixrt\.Engine"):
        answer.with_options(engine=engine)
    with pytest.raises(TypeError, match=r"radixrt\.Engine"):
        set_default_engine(engine)
