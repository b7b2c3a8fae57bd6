from __future__ import annotations

import json
import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest, ModelLoadError
from radixrt.text import ChatTemplate
from radixrt.text.chat import shielded
from tests.support.tokenizers import CHATML

ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content|trim + eos_token }}"
    "{% endif %}{% endfor %}"
)
# Writes the last answer with a part that vanishes when another message follows.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def joined(template: ChatTemplate, messages: list[dict[str, str]], **options: bool) -> str:
    return "".join(piece.text for piece in template.render(messages, **options))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_content_is_kept_apart_from_the_template() -> None:
    pieces = ChatTemplate(CHATML).render([user("hi <|im_end|>")], add_generation_prompt=True)
    assert [piece.text for piece in pieces if not piece.is_template] == ["hi <|im_end|>"]
    assert pieces[0].text.endswith("<|im_start|>user\n")
    assert pieces[-1].text == "<|im_end|>\n<|im_start|>assistant\n"


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_rendering_equals_the_plain_rendering(contents: list[str]) -> None:
    messages = [user(content) for content in contents]
    expected = "<|im_start|>system\nYou are helpful.<|im_end|>\n" + "".join(
        f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents
    )
    assert joined(ChatTemplate(CHATML), messages) == expected


def test_trimming_templates_trim() -> None:
    template = ChatTemplate(ALTERNATING, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert joined(template, [user(" a "), assistant(" b\n")]) == "<s>[INST]  a  [/INST] b</s>"
    assert joined(template, [user("a"), assistant("  ")]) == "<s>[INST] a [/INST] </s>"


def test_roles_open_one_after_another() -> None:
    """Prefixes, contents and suffixes of all messages add up to the rendering."""
    template = ChatTemplate(CHATML)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    text = ""
    for count, message in enumerate(messages):
        prefix, suffix = template.open_role(messages[:count], message["role"])
        text += prefix + message["content"] + suffix
    assert text == joined(template, messages)


def test_the_first_prefix_has_the_default_system_message() -> None:
    template = ChatTemplate(CHATML)
    assert template.open_role([], "user")[0] == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
    )
    assert template.open_role([], "system") == ("<|im_start|>system\n", "<|im_end|>\n")
    assert template.open_role([user("a")], "assistant") == ("<|im_start|>assistant\n", "<|im_end|>\n")


def test_templates_that_drop_the_last_reasoning_part_can_go_on() -> None:
    template = ChatTemplate(THINKING)
    assert template.open_role([user("a")], "assistant") == ("<|assistant|>", "<|end|>\n")
    assert template.open_role([user("a"), assistant("b")], "user") == ("<|user|>", "<|end|>\n")


def test_refused_role_order_names_the_role_and_the_reason() -> None:
    template = ChatTemplate(ALTERNATING, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.open_role([user("a")], "user")
    assert caught.value.parameter == "role"
    assert caught.value.value == "user"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages|reverse %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages|length }}",
        "{{ messages[0].content }}",
    ],
    ids=["counts first", "reverses", "counts last", "drops"],
)
def test_templates_that_do_not_append_cannot_open_roles(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).open_role([user("a")], "user")
    assert caught.value.parameter == "role"


def test_changed_or_dropped_content_is_refused() -> None:
    for source in ("{{ messages[0].content|upper }}", "fixed"):
        with pytest.raises(InvalidRequest, match="drops or changes"):
            ChatTemplate(source).render([user("a")])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "user", "content": 1},
        {"role": "user<|im_end|>", "content": "a"},
        {"role": "", "content": "a"},
    ],
)
def test_malformed_messages_are_refused(message: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=r"message 0|role"):
        ChatTemplate(CHATML).render([message])


def test_limits() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(CHATML).render([])
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(CHATML).render([user("a")] * 5000)
    with pytest.raises(InvalidRequest, match="too much text"):
        ChatTemplate("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}").render([user("a")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render([user("a")])


def test_what_templates_use() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(seen=false) %}{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% set ns.seen = true %}{% endfor %}"
        "{{ ns.seen }} {{ {'a': 'é<'}|tojson }} {{ strftime_now('%Y') }} {{ dict(a=1).a }}",
        clock=lambda: datetime(2020, 1, 1),
    )
    assert joined(template, [user("x")]) == 'xTrue {"a": "é<"} 2020 1'


def test_broken_templates_are_refused_at_load() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% for %}")


def test_variables_are_those_that_the_template_reads():
    source = (
        "{% set x = namespace(a=1) %}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}<think>{% endif %}{{ raise_exception('no') if level == 9 }}"
    )
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.variables == {"enable_thinking", "level"}
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages, variables={"enable_thinking": True})[-1].text == "<think>"
    for variables in (
        {"messages": []},
        {"bos_token": "y"},
        {"level": "<|im_end|>"},
        {"level": [1]},
        {"_x": 1},
    ):
        with pytest.raises(InvalidRequest, match=r"variable|plain word"):
            template.render(messages, variables=variables)


TOOLS_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}|{{ t.function.description }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_shielded_control_token_is_content_wherever_the_template_writes_it() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": 'say "<|im_end|>" <|im_end|>'}}
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    (tools, calls), stand_ins = shielded([[tool], [call]], re.compile(r"<\|im_(?:start|end)\|>"))
    messages = [user("hi"), {"role": "assistant", "content": "", "tool_calls": calls}]
    pieces = ChatTemplate(TOOLS_TEMPLATE).render(messages, tools=tools, stand_ins=stand_ins)
    assert "".join(piece.text for piece in pieces) == (
        json.dumps(tool) + '|say "<|im_end|>" <|im_end|><user>hi<assistant>{"<|im_end|>": ["<|im_start|>"]}'
    )
    contents = [piece.text for piece in pieces if not piece.is_template]
    assert contents == ["<|im_end|>"] * 4 + ["hi", "<|im_end|>", "<|im_start|>"]


def test_content_that_a_template_writes_as_json_is_escaped() -> None:
    result = {"role": "tool", "content": ' say "a\\b"\n', "tool_call_id": "x", "name": "f"}
    text = joined(ChatTemplate(TOOLS_TEMPLATE), [user("hi"), result])
    assert text == "<user>hi<tool>" + json.dumps(result["content"])


def test_what_is_said_beside_a_call_may_be_dropped() -> None:
    said = {"role": "assistant", "content": "let me see", "tool_calls": [{"function": {"arguments": {}}}]}
    assert joined(ChatTemplate(TOOLS_TEMPLATE), [user("hi"), said]) == "<user>hi<assistant>{}"


def test_a_content_that_the_template_writes_as_json_has_its_quotes() -> None:
    """What is written as JSON text is written by the caller, quotes included; nothing of the stand-in is left."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.open_role([user("a"), assistant("b")], "tool") == ("<tool>", "</>")
    history = [user("a"), assistant("b"), {"role": "tool", "content": "c"}]
    assert template.open_role(history, "assistant") == ("<assistant>", "</>")
    inside = source.replace("{{ m.content | tojson }}", "{{ ['x' + m.content] | tojson }}")
    with pytest.raises(InvalidRequest, match="part of JSON text"):
        ChatTemplate(inside).open_role([user("a"), assistant("b")], "tool")


@pytest.mark.parametrize(
    "beside", ["t", "tex", "text", "text0", "texttext", "text" + "0" * 31, "text" + "a" * 32, "0"]
)
def test_text_that_looks_like_a_stand_in_takes_nothing_from_one(beside: str) -> None:
    template = ChatTemplate(
        "{{ tools[0].d }}{% for m in messages %}{{ m.content }}{{ tools[0].d }}{% endfor %}"
    )
    pieces = template.render([user("mine"), user("yours")], tools=[{"d": beside}])
    assert "".join(piece.text for piece in pieces) == f"{beside}mine{beside}yours{beside}"
    assert [piece.text for piece in pieces if not piece.is_template] == ["mine", "yours"]


@pytest.mark.parametrize(
    "beside",
    ["text" + "0" * 32, "context" + "a" * 32, "text" + "0" * 16 + "j" + "0" * 16, "j", "-written-as-json"],
)
def test_json_text_is_written_as_it_is_whatever_stands_in_it(beside: str) -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content | tojson }}{{ tools[0].d }}{{ m.content }}"
        "{{ tools[0].d }}{{ [m.content | tojson] | tojson }}{% endfor %}"
    )
    content, tools = 'say "so"' + beside, [{"d": beside}]
    pieces = template.render([user(content)], tools=tools)
    quoted = json.dumps(content)
    expected = [json.dumps(tools), quoted, beside, content, beside, json.dumps([quoted])]
    assert "".join(piece.text for piece in pieces) == "".join(expected)
    assert [piece.text for piece in pieces if not piece.is_template] == [
        quoted[1:-1],
        content,
        json.dumps(quoted[1:-1])[1:-1],
    ]
