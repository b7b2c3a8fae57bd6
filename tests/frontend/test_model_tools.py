"""Tools in the form that the model's own chat template writes: Hermes, Llama 3, Mistral."""

import json
import re

import pytest

from frontend_lang import (
    HttpBackend,
    ProgramError,
    ToolAnswer,
    ToolFormat,
    Trace,
    assistant,
    gen,
    program,
    system,
    user,
)
from frontend_lang.backends import EngineBackend
from frontend_lang.tool_styles import ModelStyle, style_of
from radixrt import Engine, InvalidRequest, ToolForm
from radixrt.config import ServerConfig
from radixrt.server import create_app
from radixrt.text.tool_forms import PLAIN_FORMS
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model
from tests.support.servers import listening
from tests.support.tokenizers import CHATML
from tests.support.tool_models import TEMPLATES, UNKNOWN, tool_tokenizer

pytestmark = pytest.mark.timeout(240)


def find(key: str, depth: int = 1) -> str:
    """Find something."""
    return f'"{key}" at {depth}'


def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


@program
def ask(s, **options):
    s += system("Short.") + user("Find it.")
    s += assistant(gen("call", tools=[find, add], max_tokens=200, temperature=2.0, **options))
    s += user("Thanks.")
    return s["call"]


@pytest.fixture(scope="module", params=TEMPLATES)
def engine(request, tmp_path_factory):
    folder = tiny_model(
        "llama",
        tmp_path_factory.mktemp("models") / "tiny",
        tokenizer=tool_tokenizer(TEMPLATES[request.param]),
        max_position_embeddings=2048,
    )
    with Engine(folder, dtype="float32", num_pages=2048, threads=1) as engine:
        yield engine


def form_of(engine):
    form = EngineBackend(engine).tool_form
    assert form is not None
    assert form.is_rendered
    return form


def tool_message(form, result):
    return json.dumps(result, ensure_ascii=False) if form.is_result_json else result


def test_calls_are_written_as_the_template_writes_them_and_run(engine):
    form, names = form_of(engine), set()
    for seed in range(5):
        result = ask.with_options(engine=engine).run(seed=seed)
        call = result.value
        assert call.error is None
        names.add(call.name)
        written = result.calls[0].text
        assert form.read(written)[0] == call.name
        roles = [message["role"] for message in result.messages()]
        assert roles == ["system", "user", "assistant", form.result_role, "user"]
        assert result.messages()[3]["content"] == tool_message(form, call.result)
        ids = result.token_ids()
        assert [token_id for token_id in form.shown_ids if token_id not in ids] == []
    assert names <= {"find", "add"}


def rendered(engine, call, arguments):
    """Give the template's own text of the same conversation."""
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Find it."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "content": call.result, "tool_call_id": "call00001", "name": call.name},
        {"role": "user", "content": "Thanks."},
    ]
    return "".join(piece.text for piece in engine.tokenizer.chat.render(messages))


def test_a_transcript_is_what_the_template_makes_of_the_same_conversation(engine):
    form = form_of(engine)
    for seed in range(5):
        result = ask.with_options(engine=engine).run(seed=seed)
        _, arguments = form.read(result.calls[0].text)
        expected = rendered(engine, result.value, arguments)
        head, _, tail = expected.partition(json.dumps(arguments, ensure_ascii=False))
        text = result.text()
        if (
            form.name == "mistral"
        ):  # these templates frame a message of calls with less white space, and without a role
            text = text.replace("<|im_start|>assistant\n", "", 1)
            text, head, tail = (re.sub(r"\s", "", part) for part in (text, head, tail))
        assert text.startswith(head)
        if form.result_role == "tool":  # else the template wants an id that only it and a server make
            assert text.endswith(tail)


def test_a_model_calls_as_often_as_it_may_and_answers_in_free_text(engine):
    form, num_calls = form_of(engine), 0
    for seed in range(6):
        result = ask.with_options(engine=engine).run(seed=seed, max_rounds=2)
        answer = result.value
        assert isinstance(answer, ToolAnswer)
        assert len(answer.calls) <= 2
        num_calls += len(answer.calls)
        assert result.calls[-1].text == answer.text
        if len(answer.calls) < 2:
            assert form.trigger not in answer.text
        for record in result.calls[:-1]:
            assert form.read(record.text) is not None
    backend = EngineBackend(engine)
    requests = []

    class Heard(EngineBackend):
        async def generate(self, request):
            requests.append(request)
            return await super().generate(request)

    ask.with_options(backend=Heard(engine)).run(seed=1, max_rounds=1)
    assert requests[0].sampling.grammar is not None
    assert requests[0].sampling.shown_token_ids == backend.tool_form.shown_ids


def test_a_saved_run_replays_with_the_same_form(engine, tmp_path):
    result = ask.with_options(engine=engine).run(seed=3, max_rounds=2)
    result.trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded.recording.tool_form == form_of(engine)
    again = ask.with_options(backend=loaded.replay()).run(seed=3, max_rounds=2)
    assert (again.value, again.text()) == (result.value, result.text())


def test_a_server_tells_the_form_and_calls_are_the_same(engine):
    with listening(create_app(engine, ServerConfig())) as (_, url):
        backend = HttpBackend.connect(url)
        assert backend.tool_form == form_of(engine)
        remote = ask.with_options(backend=backend).run(seed=2)
    local = ask.with_options(engine=engine).run(seed=2)
    assert (remote.value, remote.text(), remote.token_ids()) == (local.value, local.text(), local.token_ids())


def test_the_operators_choice_of_a_form_holds_for_programs_too(engine):
    with listening(create_app(engine, ServerConfig(tool_format="llama3"))) as (_, url):
        backend = HttpBackend.connect(url)
        assert backend.tool_form.name == "llama3"
        text = ask.with_options(backend=backend).run(seed=2).calls[0].text
    assert list(json.loads(text)) == ["name", "parameters"]


def test_a_format_of_ones_own_comes_first(engine):
    result = ask.with_options(engine=engine).run(
        seed=1, tool_format=ToolFormat("CALL ", "!", result_role="user")
    )
    assert set(json.loads(result.calls[0].text)) == {"name", "arguments"}
    assert "CALL {" in result.text()


def test_a_stop_string_and_marks_of_control_tokens_do_not_go_together(engine):
    form = form_of(engine)
    if not form.shown_ids:
        assert ask.with_options(engine=engine).run(seed=1, stop="\x00").value.error is None
        return
    with pytest.raises(ProgramError, match="stop cannot be combined with tools here"):
        ask.with_options(engine=engine).run(seed=1, stop="x")


def test_a_model_that_knows_no_tools_or_an_unknown_form_gets_json_between_marks():
    for template in (CHATML, UNKNOWN):
        form = ToolForm.of(tool_tokenizer(template))
        assert style_of(None, form) == ToolFormat()
    assert style_of(None, None) == ToolFormat()
    assert style_of(None, PLAIN_FORMS["llama3"]) == ModelStyle(PLAIN_FORMS["llama3"])


def scripted(form, *answers):
    return ScriptedBackend(list(answers), form=ToolForm.of(tool_tokenizer(TEMPLATES[form])))


@program
def rounds(s, tools, **options):
    s += user("Go.") + assistant(gen("call", tools=tools, **options))
    return s["call"]


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"left": 1, "right": 2}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"left": 1, "right": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"left": 1, "right": 2}}]',
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"left": 1, "right": 2}',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_found_behind_text_and_the_answer_is_the_text_itself(name):
    backend = scripted(name, f"Let me see. {CALLS[name]}", "It is 3.")
    answer = rounds.with_options(backend=backend).run([add], max_rounds=4).value
    assert [(call.name, call.value) for call in answer.calls] == [("add", 3)]
    assert answer.text == "It is 3."


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_cut", [2, 5, 12])
def test_a_call_that_is_not_whole_fails_and_runs_nothing(name, num_cut):
    ran = []

    def add(left: int, right: int) -> int:
        ran.append(left)
        return 0

    text = CALLS[name][:-num_cut]
    with pytest.raises(ProgramError):
        rounds.with_options(backend=scripted(name, text)).run([add])
    assert ran == []


@pytest.mark.parametrize("text", ["", "no call", "<tool_call>", '<tool_call>\n{"name": "'])
def test_an_answer_where_a_call_must_be_fails(text):
    with pytest.raises(ProgramError, match="there is no call in"):
        rounds.with_options(backend=scripted("hermes", text)).run([add])


def test_a_name_that_cannot_stand_in_a_call_is_refused_with_the_way_out():
    def größe(x: int) -> int:
        return x

    with pytest.raises(ProgramError, match=r"tool_format=ToolFormat\(\)") as caught:
        rounds.with_options(backend=scripted("hermes", "x")).run([größe])
    assert isinstance(caught.value.__cause__, InvalidRequest)
    backend = scripted("hermes", '{"name": "größe", "arguments": {"x": 2}}')
    assert rounds.with_options(backend=backend).run([größe], tool_format=ToolFormat()).value.value == 2
