"""What a program writes and reads: text, gen, select, roles, variables."""

import json
import math
from pathlib import Path

import pytest
from pydantic import BaseModel

from frontend_lang import (
    ProgramError,
    assistant,
    control,
    gen,
    program,
    role,
    select,
    set_default_backend,
    system,
    user,
)
from frontend_lang.builders import ConstraintOptions, SamplingOptions
from radixrt import GrammarSpec, InvalidRequest, SamplingParams
from tests.support.backends import ScriptedBackend


@program
def chat(s, question):
    s += system("Be brief.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=64))


def test_a_program_reads_as_in_sglang():
    backend = ScriptedBackend(["Paris"])
    result = chat.with_options(backend=backend).run(question="Capital of France?")
    assert result["answer"] == "Paris"
    assert result.text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of France?<|im_end|>\n"
        "<|im_start|>assistant\nParis<|im_end|>\n"
    )
    assert result.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
    ]
    assert backend.requests[0].sampling.max_tokens == 64


def test_expressions_concatenate_and_equal_several_parts():
    @program
    def concatenated(s):
        s += assistant("Answer: " + gen("a") + "!")

    @program
    def parts(s):
        s += assistant("Answer: ", gen("a"), "!")

    texts = [
        each.with_options(backend=ScriptedBackend(["42"])).run().text() for each in (concatenated, parts)
    ]
    assert texts[0] == texts[1]
    assert texts[0].endswith("<|im_start|>assistant\nAnswer: 42!<|im_end|>\n")


def test_with_blocks_make_the_same_messages_as_role_expressions():
    @program
    def blocks(s, question):
        with s.system():
            s += "Be brief."
        with s.user():
            s += question[:3]
            s += question[3:]
        with s.assistant():
            s += gen("answer", max_tokens=64)

    one = chat.with_options(backend=ScriptedBackend(["x"])).run(question="Who?!")
    two = blocks.with_options(backend=ScriptedBackend(["x"])).run(question="Who?!")
    assert one.token_ids() == two.token_ids()


def test_other_roles_and_messages_inside_messages():
    @program
    def tool(s):
        s += role("tool", "42")
        with s.user():
            s += user("inner")

    with pytest.raises(InvalidRequest, match=r"user\(...\) cannot stand inside assistant\(...\)"):
        assistant(user("x"))
    with pytest.raises(ProgramError, match=r"begins inside user\(...\)"):
        tool.with_options(backend=ScriptedBackend()).run()


def test_reading_waits_and_values_steer_the_program():
    @program
    def steered(s):
        s += "Q" + gen("first")
        s += "long" if s["first"] == "yes" else "short"
        s += gen("second")

    backend = ScriptedBackend(["yes", "no"])
    assert steered.with_options(backend=backend).run().text() == "Qyeslongno"


def test_a_name_is_a_variable_that_rebinds():
    @program
    def loop(s):
        seen = []
        for _ in range(3):
            s += gen("step")
            seen.append(s["step"])
        return seen

    result = loop.with_options(backend=ScriptedBackend(["a", "b", "c"])).run()
    assert result.value == ["a", "b", "c"]
    assert result["step"] == "c"
    assert [(call.name, call.text) for call in result.calls] == [("step", "a"), ("step", "b"), ("step", "c")]


def test_unnamed_calls_set_no_variable_and_are_kept_apart():
    @program
    def unnamed(s):
        s += gen() + gen() + select(choices=["x", "y"])

    result = unnamed.with_options(backend=ScriptedBackend(["a", "b"])).run()
    assert result.variables == {}
    assert [call.text for call in result.calls] == ["a", "b", "x"]


def test_a_name_never_set_is_told_with_the_nearest():
    @program
    def misspelt(s):
        s += gen("answer")
        return s["anser"]

    with pytest.raises(ProgramError, match=r'has set no "anser".* Did you mean "answer"\?') as caught:
        misspelt.with_options(backend=ScriptedBackend()).run()
    assert caught.value.location is not None
    assert Path(caught.value.location.rpartition(":")[0]).name == Path(__file__).name

    @program
    def numbered(s):
        return s[5]

    with pytest.raises(ProgramError, match="has set no 5"):
        numbered.with_options(backend=ScriptedBackend()).run()
    result = chat.with_options(backend=ScriptedBackend()).run("q")
    assert "answer" in result
    assert "other" not in result
    with pytest.raises(ProgramError, match=r'Did you mean "answer"\?'):
        result["answr"]


def test_only_text_and_expressions_can_be_appended():
    @program
    def wrong(s):
        s += 5

    with pytest.raises(TypeError, match="got int: 5"):
        wrong.with_options(backend=ScriptedBackend()).run()
    with pytest.raises(TypeError, match="got NoneType"):
        gen("x") + None


def test_a_state_is_not_iterable_and_shows_itself_without_waiting():
    @program
    def odd(s):
        s += gen("x")
        assert repr(s) == "State('odd', 'root')"
        assert "x" in s
        iter(s)

    with pytest.raises(TypeError, match="not iterable"):
        odd.with_options(backend=ScriptedBackend()).run()


# -- options of gen -----------------------------------------------------------------------------------------


def test_every_option_reaches_the_request():
    options = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
        "stop": ["\n"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "seed": 3,
        "logprobs": 2,
        "choices": ["a", "b"],
    }
    known = set(ConstraintOptions.__annotations__) | set(SamplingOptions.__annotations__)
    assert set(options) | {"regex", "grammar", "heal", "timeout_s", "retries"} == known

    @program
    def all_options(s):
        s += gen("x", **options)

    backend = ScriptedBackend(["a"])
    all_options.with_options(backend=backend).run()
    sampling = backend.requests[0].sampling
    expected = {name: value for name, value in options.items() if name != "choices"}
    assert sampling == SamplingParams(**expected, grammar=GrammarSpec.choice(["a", "b"]))


def test_the_callers_objects_are_never_changed_nor_watched():
    stop, choices, bias, schema = ["a"], ["x", "y"], {1: 1.0}, {"type": "object", "properties": {}}

    @program
    def copies(s):
        s += gen("a", stop=stop, logit_bias=bias)
        s += gen("b", choices=choices)
        s += gen("c", schema=schema)
        stop.append("late")
        choices.append("late")
        bias[2] = 2.0
        schema["type"] = "array"

    backend = ScriptedBackend(["a", "x", "{}"])
    copies.with_options(backend=backend).run()
    first, second, third = (request.sampling for request in backend.requests)
    assert first.stop == ("a",)
    assert first.logit_bias == {1: 1.0}
    assert second.grammar == GrammarSpec.choice(["x", "y"])
    assert third.grammar is not None
    assert third.grammar.payload()["type"] == "object"
    assert stop == ["a", "late"]


def test_bad_options_are_refused_where_they_are_written():
    with pytest.raises(InvalidRequest, match=r"gen has no option 'max_token'. Did you mean \"max_tokens\"\?"):
        gen("x", max_token=5)
    with pytest.raises(InvalidRequest, match="temperature"):
        gen("x", temperature=-1)
    with pytest.raises(InvalidRequest, match=r"n must be a whole number in \[1, 128\], got 0"):
        gen("x", n=0)
    with pytest.raises(InvalidRequest, match="one constraint, got regex and choices"):
        gen("x", regex="a", choices=["a"])
    with pytest.raises(InvalidRequest, match=r"Pydantic model, TypedDict, dataclass .* or a JSON Schema"):
        gen("x", schema=5)
    with pytest.raises(InvalidRequest, match="must be Lark text or a GrammarSpec"):
        gen("x", grammar=5)
    with pytest.raises(InvalidRequest, match="name must be"):
        gen("")
    with pytest.raises(InvalidRequest, match="distinct"):
        select("x", ["a", "a"])
    with pytest.raises(InvalidRequest, match="1 to"):
        select("x")


def test_none_means_not_given_and_min_tokens_can_stand_alone():
    assert gen("x", stop=None, seed=None, regex=None).sampling == {}
    assert gen("x", min_tokens=500).sampling == {"min_tokens": 500}


def test_program_options_hold_where_a_gen_says_nothing():
    @program
    def two(s):
        s += gen("a") + gen("b", temperature=0.5)

    backend = ScriptedBackend(["a"])
    two.with_options(backend=backend, temperature=0, max_tokens=9).run()
    assert [request.sampling.temperature for request in backend.requests] == [0, 0.5]
    assert [request.sampling.max_tokens for request in backend.requests] == [9, 9]
    with pytest.raises(InvalidRequest, match=r"Did you mean \"temperature\"\?"):
        two.with_options(temperatur=0)


# -- values ---------------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


def test_a_pydantic_schema_gives_an_instance_and_a_dict_schema_gives_json():
    @program
    def extract(s):
        s += gen("person", schema=Person) + gen("data", schema={"type": "array"})

    backend = ScriptedBackend(['{"name": "Ada", "age": 36}', "[1, 2]"])
    result = extract.with_options(backend=backend).run()
    assert result["person"] == Person(name="Ada", age=36)
    assert result["data"] == [1, 2]
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == {**Person.model_json_schema(), "additionalProperties": False}


def test_a_value_that_fails_validation_is_an_error_that_names_the_call():
    @program
    def extract(s):
        s += gen("person", schema=Person)

    with pytest.raises(ProgramError, match=r'gen\("person"\) failed at .*ValidationError') as caught:
        extract.with_options(backend=ScriptedBackend(['{"name": "Ada"}'])).run()
    assert caught.value.call == "person"
    assert isinstance(caught.value.__cause__, ValueError)
    assert '{"name": "Ada"}' in caught.value.prompt


def test_a_value_cut_off_by_max_tokens_says_so():
    @program
    def extract(s):
        s += gen("data", schema={"type": "array"}, max_tokens=3)

    with pytest.raises(ProgramError, match=r"cut off after 3 tokens \(max_tokens\)"):
        extract.with_options(backend=ScriptedBackend(["[1, 2, 3]"])).run()


# -- select ---------------------------------------------------------------------------------------------------


def test_select_takes_the_best_mean_and_tells_the_whole_distribution():
    scores = {"yes": [-1.0, -1.0, -1.0], "no": [-1.0, -1.5]}

    @program
    def judge(s):
        s += "Good? " + select("verdict", choices=["no", "yes"])
        return s.distribution("verdict")

    result = judge.with_options(backend=ScriptedBackend(scores=scores)).run()
    assert result["verdict"] == "yes"  # mean -1.0 against -1.25
    assert result.text() == "Good? yes"
    weights = {"no": math.exp(-2.5), "yes": math.exp(-3.0)}
    for choice, weight in weights.items():
        assert result.value[choice] == pytest.approx(weight / sum(weights.values()), rel=1e-12)
    assert sum(result.value.values()) == pytest.approx(1.0)


def test_the_first_of_equal_choices_wins_and_only_select_has_a_distribution():
    @program
    def judge(s):
        s += "?" + select("a", choices=["xx", "yy"]) + gen("b")
        s.distribution("b")

    with pytest.raises(ProgramError, match='"b" is not a select') as caught:
        judge.with_options(backend=ScriptedBackend()).run()
    assert caught.value.location is not None


# -- the transcript ---------------------------------------------------------------------------------------------


def test_the_transcript_is_what_was_sent_and_received():
    @program
    def exact(s):
        s += "one " + gen("a")
        s += " two"
        s += " three " + gen("b") + select("c", choices=["p", "q"])

    backend = ScriptedBackend(["first", "second"])
    result = exact.with_options(backend=backend).run()
    token_ids = list(result.calls[0].prompt_ids)
    for before, call in zip(result.calls, result.calls[1:], strict=False):
        sent = list(call.prompt_ids)
        assert sent[: len(token_ids) + len(before.token_ids)] == token_ids + list(before.token_ids)
        token_ids = sent
    assert result.token_ids() == (*token_ids, *result.calls[-1].token_ids)
    assert result.token_ids()[0] == 0  # one begin-of-sequence token, from plain text
    assert 1 not in result.token_ids()  # no end-of-sequence token inside
    assert result.text() == backend.decode(result.token_ids()) == "one first two three secondp"


def test_neighbouring_texts_are_encoded_once_and_together():
    @program
    def texts(s):
        s += "a"
        s += "b"
        s += "c" + gen("x")

    backend = ScriptedBackend()
    texts.with_options(backend=backend).run()
    sent = [[piece.text for piece in pieces] for pieces in backend.encoded]
    assert sent[0] == ["abc"]


def test_text_of_a_stop_string_is_no_part_of_the_transcript():
    @program
    def lines(s):
        s += gen("a", stop="\n")
        s += "\n" + gen("b", stop=["END"])

    backend = ScriptedBackend(["one\ntwo", "threeEND"])
    result = lines.with_options(backend=backend).run()
    assert result["a"] == "one"
    assert result["b"] == "three"
    assert result.text() == "one\nthree" == backend.decode(result.token_ids())


def test_control_tokens_in_text_are_plain_characters_unless_asked_for():
    @program
    def injected(s, question):
        s += user(question) + control("<|im_end|>") + gen("x")

    backend = ScriptedBackend()
    injected.with_options(backend=backend).run(question="<|im_end|>")
    prompt_ids = list(backend.requests[0].prompt_ids)
    assert prompt_ids.count(3) == 3  # default system message, end of user, the one asked for


def test_a_transcript_that_starts_with_a_role_gets_no_second_bos():
    backend = ScriptedBackend()
    chat.with_options(backend=backend).run("q")
    assert 0 not in backend.requests[0].prompt_ids


# -- the engine to use ------------------------------------------------------------------------------------------


def test_the_default_backend_serves_programs_that_name_none():
    with pytest.raises(ProgramError, match="has no engine"):
        chat.run("q")
    set_default_backend(ScriptedBackend(["default"]))
    try:
        assert chat.run("q")["answer"] == "default"
        assert chat.with_options(backend=ScriptedBackend(["own"])).run("q")["answer"] == "own"
    finally:
        set_default_backend(None)


@pytest.mark.parametrize("make_text", [lambda call: f"a {call} b", str, lambda call: "%s" % call])  # noqa: UP031
def test_a_call_in_an_f_string_is_an_error(make_text):
    for call in (gen("x"), select("y", choices=["a"]), "a" + gen("x")):
        with pytest.raises(TypeError, match=r"gen\(\.\.\.\)"):
            make_text(call)
