"""From constraints to typed values: schemas, scalars, grammars, several samples, healing."""

import itertools
import re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Literal, NotRequired, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from frontend_lang import Err, Ok, ProgramError, gen, program
from frontend_lang.values import constraint_of, healed_grammar
from radixrt import Engine, GrammarSpec, InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(120)


class Person(BaseModel):
    name: Annotated[str, Field(pattern="^[a-z]{1,5}$")]
    age: Annotated[int, Field(ge=0, le=150)]


class Inner(TypedDict):
    city: Literal["Rome", "Bonn"]


class Place(TypedDict):
    where: list[Inner]
    zip: NotRequired[int]


@dataclass
class Point:
    x: int
    tag: Literal["a", "b"]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 20


class Mood(StrEnum):
    HAPPY = "happy"
    SAD = "sad"


@program
def one(s, options):
    s += "Value: " + gen("x", **options)
    return s["x"]


def value(text, **options):
    return one.with_options(backend=ScriptedBackend([text])).run(options).value


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (Person, '{"name": "ada", "age": 36}', Person(name="ada", age=36)),
        (Place, '{"where": [{"city": "Rome"}]}', {"where": [{"city": "Rome"}]}),
        (Point, '{"x": 3, "tag": "b"}', Point(3, "b")),
        (list[Person], '[{"name": "ada", "age": 36}]', [Person(name="ada", age=36)]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int | None, "null", None),
        (Colour, '"red"', Colour.RED),
        (tuple[int, str], '[1, "x"]', (1, "x")),
        ({"type": "array"}, "[1, 2]", [1, 2]),
    ],
)
def test_a_schema_gives_an_instance_of_its_type(schema, text, expected):
    got = value(text, schema=schema)
    assert got == expected
    assert type(got) is type(expected)


SCALARS = [
    (int, "-12", -12),
    (float, "2.50", 2.5),
    (Decimal, "2.50", Decimal("2.50")),
    (bool, "true", True),
    (bool, "false", False),
    (date, "2024-02-29", date(2024, 2, 29)),
    (time, "23:59:01", time(23, 59, 1)),
    (datetime, "1999-12-31T00:00:00", datetime(1999, 12, 31)),
    (UUID, "12345678-1234-5678-1234-567812345678", UUID("12345678-1234-5678-1234-567812345678")),
    (Colour, "blue", Colour.BLUE),
    (Level, "20", Level.HIGH),
    (Mood, "sad", Mood.SAD),
    (Literal["a", 2, True, None], "2", 2),
    (Literal["a", 2, True, None], "none", None),
    (str, "any", "any"),
]


@pytest.mark.parametrize(("kind", "text", "expected"), SCALARS)
def test_a_type_gives_the_plain_scalar(kind, text, expected):
    got = value(text, type=kind)
    assert got == expected
    assert type(got) is type(expected)


@given(st.dates(min_value=date(1000, 1, 1)), st.integers(0, 12), st.integers(0, 33))
def test_the_pattern_of_a_date_takes_every_day_and_no_other_text(day, month, of_month):
    grammar, _ = constraint_of({"type": date})
    assert re.fullmatch(grammar.text, day.isoformat())
    text = f"{day.year:04}-{month:02}-{of_month:02}"
    try:
        date.fromisoformat(text)
    except ValueError:
        assert not re.fullmatch(grammar.text, text)
    else:
        assert re.fullmatch(grammar.text, text)


def test_the_pattern_of_a_date_knows_every_leap_year():
    pattern = re.compile(constraint_of({"type": date})[0].text)
    for year in range(1000, 10_000):
        is_leap = (date(year, 2, 28) + timedelta(days=1)).month == 2
        assert bool(pattern.fullmatch(f"{year}-02-29")) == is_leap


def test_types_that_are_no_scalars_are_refused_with_the_way_out():
    for kind in (list[int], Person, object, 5, Literal):
        with pytest.raises(InvalidRequest, match="schema= takes every other type"):
            gen("x", type=kind)
    with pytest.raises(InvalidRequest, match="one constraint, got schema and type"):
        gen("x", schema=Person, type=int)
    with pytest.raises(InvalidRequest, match="choices must be distinct"):
        gen("x", type=Literal[1, "1"])
    for schema in (5, "text", object(), lambda: 1):
        with pytest.raises(InvalidRequest, match="schema must be a Pydantic model"):
            gen("x", schema=schema)


def test_a_grammar_is_lark_text_or_a_spec():
    text = 'start: "a" | "b"'
    assert gen(grammar=text).grammar == gen(grammar=GrammarSpec.lark(text)).grammar == GrammarSpec.lark(text)


def test_a_call_is_the_handle_of_its_value():
    @program
    def handles(s):
        first, second, unnamed = gen("x", type=int), gen("x"), gen()
        s += first + second + unnamed
        branches = s.fork(2)
        branches += first
        return (
            s[first],
            s[second],
            s[unnamed],
            s["x"],
            [branch[first] for branch in branches],
            first,
            s[first],
        )

    result = handles.with_options(backend=ScriptedBackend(["1", "2", "3", "4", "5"])).run()
    *values, first, same = result.value
    assert values == [1, "2", "3", "2", [4, 5]]
    assert result[first] == same == 1
    with pytest.raises(ProgramError, match=r'has set no gen\("y"\)'):
        result[gen("y")]
    assert result.variables == {"x": "2"}


def test_a_state_generates_and_gives_the_value_at_once():
    @program
    def direct(s):
        s += "Who? "
        person = s.gen("person", schema=Person)
        return person.age + s.gen(type=int), s.select("c", ["u", "v"]), s.text()

    backend = ScriptedBackend(['{"name": "ada", "age": 36}', "4"])
    assert direct.with_options(backend=backend).run().value == (
        40,
        "u",
        'Who? {"name": "ada", "age": 36}4u',
    )


# -- several samples --------------------------------------------------------------------------------------------


def test_n_gives_branches_and_the_state_goes_on_with_the_first():
    @program
    def sampled(s):
        s += "Q " + gen("x", n=3, type=int) + " then "
        branches = s["x"]
        branches += "!" + gen("y")
        s += gen("z")
        return [(branch["x"], branch.text()) for branch in branches], len(branches), s.text()

    backend = ScriptedBackend(lambda request, prompt: str(backend.num_calls))
    result = sampled.with_options(backend=backend).run()
    samples, num, text = result.value
    assert [number for number, _ in samples] == [1, 2, 3]
    assert num == 3
    assert all(f"Q {number}!" in branch for number, branch in samples)
    assert text.startswith("Q 1 then ")
    assert backend.requests[0].sampling.n == 3
    first = [call for call in result.calls if call.name == "x"]
    assert [call.branch for call in first] == ["root", "root/1", "root/2"]
    assert [call.text for call in first] == ["1", "2", "3"]
    assert [call.usage.prompt_tokens for call in first] == [3, 0, 0]  # the request is counted once


def test_a_sample_that_is_no_value_fails_alone():
    @program
    def sampled(s):
        s += gen("x", n=3, type=int)
        return [type(outcome) for outcome in s["x"].join()]

    backend = ScriptedBackend(["1", "two", "3"])
    assert sampled.with_options(backend=backend).run().value == [Ok, Err, Ok]

    @program
    def unlooked(s):
        s += gen("x", n=2, type=int)

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed at .*ValueError: invalid literal'):
        unlooked.with_options(backend=ScriptedBackend(["1", "two"])).run()


def test_a_failed_call_of_several_samples_fails_every_branch():
    @program
    def sampled(s):
        s += gen("x", n=2)
        with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
            s["x"]
        s.sync()

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        sampled.with_options(backend=ScriptedBackend(fail_at={0})).run()


# -- healing ------------------------------------------------------------------------------------------------------


def test_healing_takes_back_the_last_token_of_plain_text_only():
    @program
    def healed(s):
        s += "http:" + gen("x", heal=True)
        return s["x"], s.text()

    backend = ScriptedBackend(["://example"])
    result = healed.with_options(backend=backend).run()
    assert result.value == ("//example", "http://example")
    assert result.text() == backend.decode(result.token_ids())
    request = backend.requests[0]
    assert backend.decode(request.prompt_ids) == "http"
    assert re.fullmatch(request.sampling.grammar.text, "://any\ntext")
    assert not re.fullmatch(request.sampling.grammar.text, "//")


@pytest.mark.parametrize(
    ("options", "taken", "refused"),
    [
        ({"regex": "[a-z]+"}, ":abc", ":1"),
        ({"choices": ["//", "x"]}, None, None),
        ({"type": int}, ":12", ":x"),
    ],
)
def test_healing_keeps_the_callers_constraint(options, taken, refused):
    grammar = healed_grammar(gen(heal=True, **options).grammar, ":")
    if taken is None:
        assert grammar == GrammarSpec.choice([":" + choice for choice in options["choices"]])
    else:
        assert re.fullmatch(grammar.text, taken)
        assert not re.fullmatch(grammar.text, refused)


def test_nothing_is_healed_behind_generated_text_or_a_template_or_at_the_start():
    @program
    def after(s, start):
        s += start
        s += gen("a") + gen("b", heal=True)

    @program
    def role(s):
        with s.assistant():
            s += gen("x", heal=True)

    backend = ScriptedBackend(["abc"])
    after.with_options(backend=backend).run("text")
    role.with_options(backend=backend).run()
    assert [request.sampling.grammar for request in backend.requests] == [None] * 3


def test_healing_is_refused_where_it_cannot_hold():
    with pytest.raises(InvalidRequest, match="heal takes no schema or grammar"):
        gen("x", heal=True, schema=Person)
    with pytest.raises(InvalidRequest, match="heal must be a bool"):
        gen("x", heal=1)

    @program
    def short(s):
        s += "http:" + gen("x", heal=True)

    with pytest.raises(ProgramError, match="cut off before it began with ':'"):
        short.with_options(backend=ScriptedBackend(["/"])).run()


def test_healed_text_streams_without_what_was_taken_back():
    @program
    def healed(s):
        s += "http:" + gen("x", heal=True)

    backend = ScriptedBackend(["://example"], chunk_characters=2)
    stream = healed.with_options(backend=backend).stream()
    assert list(stream.text_iter("x")) == ["/", "/e", "xa", "mp", "le"]
    assert "".join(stream.text_iter()) == stream.text()


# -- on an engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in SCALARS if kind is not str))
def test_an_engine_gives_only_values_of_the_type(engine, kind):
    runner = one.with_options(engine=engine, temperature=3.0, max_tokens=64)
    expected = type(kind) if isinstance(kind, type) else object
    for seed in range(4):
        got = runner.run({"type": kind, "seed": seed}).value
        assert isinstance(got, kind) if expected is not object else got in ("a", 2, True, None)


@pytest.mark.parametrize("schema", [Person, Place, Point, list[Inner]])
def test_an_engine_gives_only_values_of_the_schema(engine, schema):
    for seed in range(2):
        options = {"schema": schema, "seed": seed, "temperature": 2.0, "max_tokens": 200}
        one.with_options(engine=engine).run(options)


def test_samples_of_one_prompt_compute_it_once(engine):
    @program
    def sampled(s):
        s += "a prompt of some length " + gen("x", n=4, max_tokens=6, seed=1)
        return s["x"]

    engine.clear_cache()
    result = sampled.with_options(engine=engine).run()
    texts = [branch["x"] for branch in result.value]
    assert len(texts) == 4
    call = result.calls[0]
    assert call.computed_tokens <= call.prompt_tokens + 4 * 6 + 4 * 3  # at most a partly filled page each
    for left, right in itertools.pairwise(result.value):
        assert left.token_ids()[: call.prompt_tokens] == right.token_ids()[: call.prompt_tokens]


def test_a_healed_call_on_an_engine_begins_as_its_prompt_ended(engine):
    @program
    def healed(s):
        s += "http:" + gen("x", heal=True, max_tokens=8, temperature=0)
        return s["x"], s.text()

    result = healed.with_options(engine=engine).run()
    text, whole = result.value
    assert whole == "http:" + text
    assert engine.tokenizer.decode(result.token_ids()) == whole


@pytest.mark.model
def test_healing_lets_the_default_model_write_the_token_it_knows():
    @program
    def link(s, heal):
        s += 'Wikipedia: <a href="http:' + gen("x", heal=heal, max_tokens=6, temperature=0)
        return s["x"]

    with Engine("smollm2-135m") as engine:
        runner = link.with_options(engine=engine)
        healed = runner.run(True)
        assert healed.value.startswith("//")
        assert not runner.run(False).value.startswith("//")  # ":" and "//" apart are not what it has learned
        whole = engine.tokenizer.encode_continuation("://")
        assert healed.calls[0].token_ids[: len(whole)] == tuple(whole)
        assert engine.tokenizer.decode(healed.token_ids()) == healed.text()
