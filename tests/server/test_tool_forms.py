"""Forms of tool calls: what the constraint lets through is read back as valid calls, however it is cut."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from radixrt.errors import InvalidRequest, UnsupportedGrammar
from radixrt.grammar import GrammarCache
from radixrt.server.bodies_tools import ChosenTool
from radixrt.server.tool_plan import ArgumentSchemas, Tool, arguments_of, plan_tools
from radixrt.server.tool_reader import ToolReader
from radixrt.text import Detokenizer
from radixrt.text.tool_forms import PLAIN_FORMS, ToolForm
from radixrt.types import FinishReason
from tests.support.tokenizers import CHATML
from tests.support.tool_models import TEMPLATES, UNKNOWN, tool_tokenizer

TOKENIZERS = {name: tool_tokenizer(template) for name, template in TEMPLATES.items()}
CACHES = {name: GrammarCache(tokenizer) for name, tokenizer in TOKENIZERS.items()}
FORMS = {name: ToolForm.of(tokenizer, "auto") for name, tokenizer in TOKENIZERS.items()}
SCHEMAS = [
    None,
    {"type": "object"},
    {"type": "object", "properties": {"q": {"type": "string", "maxLength": 8}}, "required": ["q"]},
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "deep": {"$ref": "#/$defs/D"}},
        "required": ["n", "deep"],
        "additionalProperties": False,
        "$defs": {"D": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
    },
    {"properties": {"kind": {"enum": ["}", "</tool_call>", '"}]', "[TOOL_CALLS]"]}}, "required": ["kind"]},
    {
        "$ref": "#/$defs/N",
        "$defs": {
            "N": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
]
NAMES = ["f", "ff", "get_weather", "a.b/c:d-e", "name", "arguments"]
check = ArgumentSchemas(next(iter(CACHES.values())).get)


def tool(name, schema=None, *, is_strict=False, index=0):
    return Tool(name, "d", schema, is_strict=is_strict, pointer=f"tools/{index}/function/parameters")


def written_at_random(name, plan, rng, max_tokens):
    """Walk through the constraint's masks; give the ids and the text, which is complete."""
    tokenizer = TOKENIZERS[name]
    matcher = CACHES[name].get(plan.grammar).start()
    width = (tokenizer.vocab_size + 31) // 32
    ids = []
    while not matcher.is_terminated:
        left = max_tokens - len(ids)
        if left <= 0 and matcher.is_accepting:
            break
        if left <= 0:
            run = matcher.closing_run(400)
            assert run is not None
            assert all(matcher.accept(token_id) for token_id in run)
            ids += run
            break
        if matcher.is_accepting and rng.random() < 0.05:
            break
        row = np.zeros(width, dtype=np.int32)
        matcher.fill_mask(row)
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = [int(bit) for bit in bits if int(bit) not in tokenizer.eos_ids]
        if not allowed:
            break
        # Tokens that make progress in tool calls are taken more often than chance would.
        likely = [item for item in allowed if re.search(rb'[<\[{"}\]/]', tokenizer.vocab_bytes[item] or b"[")]
        token_id = rng.choice(likely if likely and rng.random() < 0.6 else allowed)
        assert matcher.accept(token_id)
        ids.append(token_id)
    detokenizer = Detokenizer(tokenizer, shown_ids=plan.form.shown_ids)
    return detokenizer.push(ids).text + detokenizer.finish().text


def joined(deltas):
    """Put deltas together as clients do."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": "", "id": part["id"]})
            else:
                assert set(part) == {"index", "function"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_constraint_lets_through_is_read_as_valid_calls(name, seed):
    rng = random.Random(f"{name}{seed}")
    tools = [
        tool(called, rng.choice(SCHEMAS), index=at)
        for at, called in enumerate(rng.sample(NAMES, rng.randint(1, 4)))
    ]
    choice = rng.choice(["auto", "required", "named"])
    body_choice = choice
    if choice == "named":
        body_choice = ChosenTool.model_validate({"type": "function", "function": {"name": tools[0].name}})
    is_parallel = rng.random() < 0.7
    plan = plan_tools(FORMS[name], tools, body_choice, is_parallel=is_parallel, check=check)
    by_name = {item.name: item for item in tools}
    for _ in range(4):
        text = written_at_random(name, plan, rng, rng.choice([0, 30, 120]))
        whole = ToolReader(plan.form)
        deltas = [*whole.push(text), *whole.finish()]
        content, calls = joined(deltas)
        for call in calls:
            value = json.loads(call["arguments"])
            schema = by_name[call["name"]].parameters or {"additionalProperties": False}
            jsonschema.Draft202012Validator({"type": "object", **schema}).validate(value)
        assert plan.form.trigger not in content
        if choice != "auto":
            assert calls
            assert not content.strip()
        if not is_parallel or choice == "named" or name == "llama3":
            assert len(calls) <= 1
        pieces = ToolReader(plan.form)
        cut = []
        at = 0
        while at < len(text):
            step = rng.randint(1, 7)
            cut += pieces.push(text[at : at + step])
            at += step
        cut += pieces.finish()
        again, same = joined(cut)
        assert again == content
        assert [(c["name"], c["arguments"]) for c in same] == [(c["name"], c["arguments"]) for c in calls]
        message = pieces.message()
        assert (message["content"] or "") == content
        assert [c["function"]["arguments"] for c in message.get("tool_calls", [])] == [
            c["arguments"] for c in calls
        ]
        assert pieces.finish_name(FinishReason.STOP) == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_own_writing_is_let_through_and_read(name):
    """What the template writes for calls of earlier answers is what the constraint takes."""
    tokenizer, form = TOKENIZERS[name], FORMS[name]
    assert form.is_rendered
    assert form.name == name.partition("_")[0]
    calls = [("f", '{"q": "a"}'), ("get_weather", '{"q": "}\\""}')][: form.max_calls or 2]
    tools = [tool(called, SCHEMAS[2], index=at) for at, (called, _) in enumerate(calls)]
    plan = plan_tools(form, tools, "required", is_parallel=True, check=check)
    matcher = CACHES[name].get(plan.grammar).start()
    text = form.written(calls)
    for part in re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text):
        ids = (
            [tokenizer._backend.token_to_id(part)]
            if part in ("[TOOL_CALLS]", "[ARGS]")
            else tokenizer.encode_continuation(part)
        )
        assert all(matcher.accept(token_id) for token_id in ids)
    assert matcher.is_accepting
    reader = ToolReader(form)
    _, found = joined([*reader.push(text), *reader.finish()])
    assert [(call["name"], call["arguments"]) for call in found] == calls
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": f"abcdefgh{at}",
                    "type": "function",
                    "function": {"name": called, "arguments": json.loads(arguments)},
                }
                for at, (called, arguments) in enumerate(calls)
            ],
        },
    ]
    rendered = "".join(piece.text for piece in tokenizer.chat.render(messages))
    without_ids = re.sub(r', "id": "\w+"', "", rendered)
    assert text in without_ids


def test_forms_are_found_by_what_templates_write():
    assert FORMS["llama3"].max_calls == 1
    assert [FORMS[name].max_calls for name in ("hermes", "mistral", "mistral_args")] == [None] * 3
    assert FORMS["mistral"].is_list
    assert len(FORMS["mistral_args"].shown_ids) == 2
    assert ToolForm.of(tool_tokenizer(UNKNOWN), "auto") is None
    assert ToolForm.of(tool_tokenizer(CHATML), "auto") == PLAIN_FORMS["hermes"]
    assert ToolForm.of(TOKENIZERS["hermes"], "llama3") == PLAIN_FORMS["llama3"]
    assert not ToolForm.of(TOKENIZERS["llama3"], "hermes").is_rendered


def test_a_text_without_calls_is_given_as_it_is():
    for text in ("", "  a \n", "<tool", "<tool_call", "\n\n", 'x {"name'):
        reader = ToolReader(PLAIN_FORMS["hermes"])
        content, calls = joined([*reader.push(text), *reader.finish()])
        assert (content, calls) == (text, [])
        assert reader.message()["content"] == text


def test_a_call_that_was_cut_off_keeps_what_was_written():
    reader = ToolReader(PLAIN_FORMS["hermes"])
    _, calls = joined([*reader.push('<tool_call>\n{"name": "f", "arguments": {"a": "b'), *reader.finish()])
    assert calls[0]["arguments"] == '{"a": "b'


@pytest.mark.parametrize(
    ("schema", "error", "pointer"),
    [
        ({"type": "string"}, InvalidRequest, "tools/3/function/parameters/type"),
        ({"type": ["object"]}, InvalidRequest, "tools/3/function/parameters/type"),
        ({"type": "object", "properties": {"a": {"type": "wrong"}}}, InvalidRequest, "tools/3/function/parameters/properties/a/type"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, UnsupportedGrammar, "tools/3/function/parameters/properties/a/uniqueItems"),
    ],
)  # fmt: skip
def test_a_strict_schema_is_enforced_or_refused_by_name(schema, error, pointer):
    with pytest.raises(error) as caught:
        arguments_of(tool("f", schema, is_strict=True, index=3), next(iter(CACHES.values())).get)
    assert caught.value.parameter == pointer
    assert "'f'" in str(caught.value)


def test_a_loose_schema_that_cannot_be_enforced_is_any_object():
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    plan = plan_tools(
        FORMS["mistral"],
        [tool("f", schema), tool("g", SCHEMAS[2])],
        "required",
        is_parallel=True,
        check=check,
    )
    assert plan.loose_names == ("f",)
    with pytest.raises(InvalidRequest):
        plan_tools(FORMS["hermes"], [tool("f", {"type": "array"})], "auto", is_parallel=True, check=check)
