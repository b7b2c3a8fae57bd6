"""Text and token ids by a tokenizer in this process, as a program's transcript needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast, get_args

import tokenizers

from frontend_lang.backends.values import InvalidRequest, TextPiece, ToolForm
from radixrt.text.tokenizer import Tokenizer
from radixrt.text.tool_forms import FormChoice as FormChoice
from radixrt.text.tool_forms import FormTokenizer


class RuntimeTokenizer(FormTokenizer, Protocol):
    """The part of a radixrt tokenizer that a program needs, besides what tells the form of tool calls."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class LocalText:
    """Do what `Backend` says of text by a tokenizer.

    Args:
        tool_format: the form of calls to use: "auto" = what the model's template writes.
    """

    def __init__(self, tokenizer: RuntimeTokenizer, *, tool_format: FormChoice = "auto") -> None:
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self.bos_ids = tuple(tokenizer.encode(""))
        self.eos_ids = frozenset(tokenizer.eos_ids)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """Give the form of the model's calls. Runs its template when first asked for."""
        return ToolForm.of(self._tokenizer, self._tool_format)

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        """Encode pieces as one text."""
        if is_start or any(piece.is_template for piece in pieces):
            return self._tokenizer.encode_pieces(pieces)
        return self._tokenizer.encode_continuation("".join(piece.text for piece in pieces))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of ids."""
        return self._tokenizer.decode(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        """Give the template's text before and after a message.

        Raises:
            InvalidRequest: the model has no chat template.
        """
        if self._tokenizer.chat is None:
            raise InvalidRequest(
                "the model has no chat template, so a program cannot use roles with it",
                parameter="role",
                value=role,
            )
        return self._tokenizer.chat.open_role(history, role)


def tokenizer_of(told: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a radixrt server tells at /tokenizer.

    Raises:
        KeyError, TypeError, ValueError: something is missing or not of its kind.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(told["tokenizer_json"])
    except Exception as error:
        raise ValueError(f"tokenizer_json: {error}") from error  # the library raises plain exceptions
    return Tokenizer(
        backend,
        special_tokens=told["special_tokens"],
        eos_ids=told["eos_ids"],
        chat_template=told["chat_template"],
        add_bos=told["add_bos"],
    )


def tool_format_of(told: Mapping[str, Any]) -> FormChoice:
    """Give the form of tool calls that a radixrt server tells at /tokenizer.

    Raises:
        ValueError: it is none.
    """
    wanted = told.get("tool_format", "auto")
    if wanted not in get_args(FormChoice):
        raise ValueError(f"tool_format: {wanted!r}")
    return cast(FormChoice, wanted)
