"""Chat templates: messages to pieces of prompt text, with content kept apart from control tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from radixrt.errors import InvalidRequest, ModelLoadError, first_line, suggest
from radixrt.types import TextPiece

MAX_MESSAGES = 4096
MAX_CONTENT_CHARACTERS = 1 << 24  # all messages together
MAX_TEMPLATE_CHARACTERS = 1 << 20  # what the template itself may add

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_FIELDS = frozenset({"role", "content"})
_FIELDS_OF = {"assistant": frozenset({"tool_calls"}), "tool": frozenset({"tool_call_id", "name"})}
# A name, with one mark in its middle for each time that the template wrote it through its filter `tojson`: there no
# text beside it can be taken for a mark. Its first letter is no hexadecimal digit: what looks like a name never takes
# the beginning of a real one away.
_AS_JSON = "j"
_STAND_IN = re.compile(f"(text[0-9a-f]{{16}})({_AS_JSON}*)([0-9a-f]{{16}})")
# What `render` sets itself; a caller's variable of such a name would forge a prompt.
_OWN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"}
)
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_ .,:+-]{0,64}")  # no control token is made of these alone
# What a template can raise besides Jinja's own errors when it meets messages that it was not written for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's Jinja template, run in a sandbox. Immutable.

    Content is never shown to the template: it sees a name that nobody can guess, framed by the content's own
    outer white space (so that trimming works), and the content takes the name's place afterwards. A template that
    looks into content (to cut a reasoning part out of old answers, say) therefore finds nothing to cut.
    """

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            special_tokens: variables for the template, e.g. {"bos_token": "<s>"}.
            clock: what `strftime_now` reads.
        Raises:
            ModelLoadError: the template is not valid Jinja.
        """
        self.source = template
        self._special_tokens = dict(special_tokens or {})
        try:
            environment = _environment(clock)
            self._template = environment.from_string(template)
            names = jinja2.meta.find_undeclared_variables(environment.parse(template))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise ModelLoadError(f"the chat template is not valid: {first_line(error)}") from error
        self.variables: frozenset[str] = frozenset(
            name
            for name in names - _OWN_NAMES - set(self._special_tokens)
            if not name.startswith("_") and not name.endswith("_token") and name not in environment.globals
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stand_ins: Mapping[str, str] | None = None,
    ) -> list[TextPiece]:
        """Give the prompt as template pieces and content pieces, in order; joined they are the prompt.

        Args:
            messages: each has a "role" and a "content", both strings; an assistant's may have "tool_calls", and a
                tool's "tool_call_id" and "name". What an assistant says beside its calls may be dropped.
            add_generation_prompt: end with what opens the assistant's answer.
            tools: descriptions of functions, as templates take them.
            stand_ins: names in tools and tool calls (see `Tokenizer.shielded`) and the content they stand for.
            variables: values of names in `self.variables`, e.g. {"enable_thinking": False}: truth values, numbers
                and short plain words, for what they write counts as template text.
        Raises:
            InvalidRequest: a message has the wrong form, or the template refuses, drops or changes one, or it
                reads no such variable.
        """
        _check_messages(messages)
        self._check_variables(variables or {})
        cores = [message["content"].strip() for message in messages]
        names = {_sentinel(): index for index, core in enumerate(cores) if core}
        shown = [dict(message) for message in messages]
        for name, index in names.items():
            shown[index]["content"] = messages[index]["content"].replace(cores[index], name)
        contents = {**(stand_ins or {}), **{name: cores[index] for name, index in names.items()}}
        text = self._run(
            shown,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            tools=tools,
            stand_ins=contents,
        )
        parts = _cut(text, contents)
        written = {_unmarked(part) for part in parts[1::2]}
        for name, index in names.items():
            if name not in written and not messages[index].get("tool_calls"):
                raise InvalidRequest(
                    f"the model's chat template drops or changes the content of message {index} "
                    f"(role {messages[index]['role']!r})",
                    parameter="messages",
                    value=messages[index]["role"],
                )
        return _pieces(parts, contents)

    def open_role(self, history: Sequence[Message], role: str) -> tuple[str, str]:
        """Give the template text before and after the content of the message that follows `history`.

        What the template puts before the first message (BOS, a default system message) is in the first prefix.
        Of a content that it writes as JSON text, the JSON text takes the place: the quotes are part of the content.
        The prefix of the assistant is the generation prompt. Only the roles in `history` matter.

        Raises:
            InvalidRequest: the template refuses this order of roles, or writes the earlier messages
                differently once this one follows.
        """
        roles = [*(message["role"] for message in history), role]
        _check_messages([{"role": name, "content": ""} for name in roles])
        names = [_sentinel() for _ in roles]
        shown = [{"role": name, "content": content} for name, content in zip(roles, names, strict=True)]
        # Both lists alternate: text before content 0, text between 0 and 1, ..., text after the last.
        after = self._frames(shown, names)
        before = self._frames(shown[:-1], names[:-1]) if history else [""]
        # An assistant message was opened by the generation prompt, whatever a closed one is rendered with.
        compared = len(before) - (2 if history and roles[-2] == "assistant" else 1)
        if after[:compared] != before[:compared] or not after[-2].startswith(before[-1]):
            raise _refused_role(role, "it changes earlier messages when this one follows")
        prefix, suffix = after[-2][len(before[-1]) :], after[-1]
        if role == "assistant" and history:
            closed = self._run(shown[:-1], add_generation_prompt=False)
            opened = self._run(shown[:-1], add_generation_prompt=True)
            if opened.startswith(closed) and opened != closed:
                prefix = opened[len(closed) :]
        return prefix, suffix

    def _frames(self, shown: Sequence[Message], names: Sequence[str]) -> list[str]:
        """Render and give the text around the contents; each must appear once and in order."""
        role = shown[-1]["role"]
        try:
            text = self._run(shown, add_generation_prompt=False, stand_ins=names)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), parameter="role", value=role) from error
        for name in names:
            text = text.replace(f'"{_marked(name)}"', name)
        parts = _cut(text, names)
        if any(_unmarked(part) != part for part in parts[1::2]):
            raise _refused_role(role, "it writes a message as a part of JSON text")
        if parts[1::2] != list(names):
            raise _refused_role(role, "it drops, repeats or changes a message")
        return parts[::2]

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if name not in self.variables:
                raise InvalidRequest(
                    f"the model's chat template reads no variable {name!r}.{suggest(name, self.variables)}",
                    parameter=f"chat_template_kwargs/{name}",
                )
            is_word = isinstance(value, str) and _PLAIN_TEXT.fullmatch(value)
            if not (is_word or value is None or isinstance(value, bool | int | float)):
                raise InvalidRequest(
                    f"{name} must be a truth value, a number or a short plain word",
                    parameter=f"chat_template_kwargs/{name}",
                )

    def _run(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stand_ins: Collection[str] = (),
    ) -> str:
        limit = MAX_TEMPLATE_CHARACTERS + 4 * sum(len(message["content"]) for message in messages)
        # Indented JSON: at each of the body's levels of nesting a character can bring some more.
        limit += 16 * len(json.dumps([tools, [message.get("tool_calls") for message in messages]]))
        parts: list[str] = []
        num_characters = 0
        try:
            for part in self._template.generate(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                _stand_ins=stand_ins,
                **self._special_tokens,
                **(variables or {}),
            ):
                num_characters += len(part)
                if num_characters > limit:
                    raise ValueError("it writes too much text")
                parts.append(part)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {first_line(error)}",
                parameter="messages",
                value=[message["role"] for message in messages],
            ) from error
        return "".join(parts)


def _refused_role(role: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template cannot take a {role!r} message here: {reason}",
        parameter="role",
        value=role,
    )


def _check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest unless the messages have the right form and are within the limits."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"there must be 1 to {MAX_MESSAGES} messages, got {len(messages)}",
            parameter="messages",
            value=len(messages),
        )
    num_characters = 0
    for index, message in enumerate(messages):
        texts = [value for name, value in message.items() if name != "tool_calls"]
        extra = _FIELDS_OF.get(message.get("role", ""), frozenset())
        if set(message) - extra != _FIELDS or not all(isinstance(value, str) for value in texts):
            raise InvalidRequest(
                f"message {index} must have the strings role and content, and none but a tool's fields besides, "
                f"got {sorted(message)}",
                parameter=f"messages/{index}",
                value=sorted(message),
            )
        if not _ROLE.fullmatch(message["role"]):
            raise InvalidRequest(
                f"a role must be a short name of letters, digits, _ and -, got {message['role'][:80]!r}",
                parameter=f"messages/{index}/role",
                value=message["role"][:80],
            )
        num_characters += len(message["content"])
    if num_characters > MAX_CONTENT_CHARACTERS:
        raise InvalidRequest(
            f"messages must have at most {MAX_CONTENT_CHARACTERS} characters together, got {num_characters}",
            parameter="messages",
            value=num_characters,
        )


def _sentinel() -> str:
    return f"text{secrets.token_hex(16)}"


def _marked(name: str) -> str:
    """Give a name as `tojson` writes it. Pure."""
    return _STAND_IN.sub(rf"\1\2{_AS_JSON}\3", name)


def _unmarked(part: str) -> str:
    """Give a name without its marks. Pure."""
    return part.replace(_AS_JSON, "")


def _cut(text: str, names: Collection[str]) -> list[str]:
    """Cut text at the names; even entries are what lies between, odd entries are names with their marks. Pure."""
    parts, position = [], 0
    for found in _STAND_IN.finditer(text):
        if found[1] + found[3] in names:
            parts += [text[position : found.start()], found[0]]
            position = found.end()
    return [*parts, text[position:]]


def _pieces(parts: Sequence[str], contents: Mapping[str, str]) -> list[TextPiece]:
    """Put the contents in the places of their names; `parts` as `_cut` gives them."""
    pieces: list[TextPiece] = []
    for index, part in enumerate(parts):
        if index % 2:
            content = contents[_unmarked(part)]
            for _ in range(part.count(_AS_JSON)):
                content = json.dumps(content, ensure_ascii=False)[1:-1]
            pieces.append(TextPiece(content))
        elif part:
            pieces.append(TextPiece(part, is_template=True))
    return pieces


def shielded(value: Any, controls: re.Pattern[str]) -> tuple[Any, dict[str, str]]:
    """Put a name that nobody can guess for each control token that a string of a JSON value spells. Pure.

    Returns: the value, and name -> what it stands for.
    """
    names: dict[str, str] = {}

    def name_of(found: re.Match[str]) -> str:
        return names.setdefault(found[0], _sentinel())

    def walk(item: Any) -> Any:
        if isinstance(item, str):
            return controls.sub(name_of, item)
        if isinstance(item, dict):
            return {walk(key): walk(inner) for key, inner in item.items()}
        return [walk(inner) for inner in item] if isinstance(item, list) else item

    return walk(value), {name: text for text, name in names.items()}


class _GenerationTag(jinja2.ext.Extension):
    """Accept {% generation %}: some templates mark the assistant's text for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is declared by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose names cannot reach Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _environment(clock: Callable[[], datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Build the environment that chat templates are written for.

    Source: Hugging Face transformers, utils/chat_template_utils.py (which names and filters exist).
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _to_json(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    names = context["_stand_ins"]
    return _STAND_IN.sub(lambda found: _marked(found[0]) if found[1] + found[3] in names else found[0], text)
