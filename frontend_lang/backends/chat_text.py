"""A chat without a tokenizer: a program's transcript as numbers that stand for characters and message marks.

A chat server takes messages and tells no token ids. So that programs need no second kind of transcript, this module
gives one number per character (its code point), three for the marks around a message, and one for each token whose
log-probability the server told:

    <|user|>\\nHi<|end|>\\n   <->   [BEGIN u s e r CONTENT H i END]

The numbers are private: they come back as messages exactly, and mean nothing to anybody else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from frontend_lang.backends.values import InvalidRequest, TextPiece

BEGIN, CONTENT, END = 0x110000, 0x110001, 0x110002  # beyond the last code point
FIRST_TOKEN = 0x200000

SUFFIX = "<|end|>\n"
_MARKS = re.compile(r"<\|end\|>\n|<\|(?P<role>[^|\n]+)\|>\n")


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message; only the last of a transcript may be open."""

    role: str
    content: str
    is_open: bool = False


class ChatText:
    """Map text to numbers and back. Owns the names of tokens: token -> number, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._tokens: list[bytes] = []
        self._lock = threading.Lock()  # programs of several threads may share a backend

    def encode(self, pieces: Sequence[TextPiece]) -> list[int]:
        """Give the numbers of pieces.

        Raises:
            InvalidRequest: control text that is no message mark.
        """
        numbers: list[int] = []
        for piece in pieces:
            numbers += _marks(piece.text) if piece.is_template else map(ord, piece.text)
        return numbers

    def token(self, token: bytes) -> int:
        """Give the number of a server's token."""
        with self._lock:
            if token not in self._numbers:
                self._numbers[token] = FIRST_TOKEN + len(self._tokens)
                self._tokens.append(token)
            return self._numbers[token]

    def decode(self, numbers: Sequence[int]) -> str:
        """Give the text of numbers, message marks in their readable form."""
        parts: list[bytes] = []
        for number in numbers:
            match number:
                case 0x110000:
                    parts.append(b"<|")
                case 0x110001:
                    parts.append(b"|>\n")
                case 0x110002:
                    parts.append(SUFFIX.encode())
                case _ if number >= FIRST_TOKEN:
                    parts.append(self._tokens[number - FIRST_TOKEN])
                case _:
                    parts.append(chr(number).encode("utf-8", "surrogatepass"))
        return b"".join(parts).decode("utf-8", "replace")

    def messages(self, numbers: Sequence[int]) -> list[Message]:
        """Give the messages of a transcript.

        Raises:
            InvalidRequest: text outside of a message.
        """
        found: list[Message] = []
        place = 0
        while place < len(numbers):
            if numbers[place] != BEGIN:
                stop = _find(numbers, BEGIN, place)
                stray = self.decode([number for number in numbers[place:stop] if number != END])
                raise InvalidRequest(
                    f"a chat server takes messages only, and {stray[:60]!r} stands outside of one: "
                    "put it into system(...), user(...) or assistant(...)",
                    parameter="prompt",
                    value=stray,
                )
            middle = _find(numbers, CONTENT, place)
            stop = _find(numbers, END, middle)
            role, content = self.decode(numbers[place + 1 : middle]), self.decode(numbers[middle + 1 : stop])
            found.append(Message(role, content, is_open=stop == len(numbers)))
            place = stop + 1
        return found


def prefix(role: str) -> str:
    """Give the readable mark that begins a message. Pure.

    Raises:
        InvalidRequest: a role that no message can have.
    """
    if not _MARKS.fullmatch(mark := f"<|{role}|>\n") or mark == SUFFIX:
        raise InvalidRequest(f"no chat message can have the role {role!r}", parameter="role", value=role)
    return mark


def _find(numbers: Sequence[int], number: int, start: int) -> int:
    return next((place for place in range(start, len(numbers)) if numbers[place] == number), len(numbers))


def _marks(text: str) -> list[int]:
    numbers: list[int] = []
    place = 0
    while place < len(text):
        found = _MARKS.match(text, place)
        if found is None:
            raise InvalidRequest(
                f"control text cannot be sent to a chat server, which makes its own: {text[place : place + 60]!r}",
                parameter="control",
                value=text,
            )
        role = found["role"]
        numbers += [END] if role is None else [BEGIN, *map(ord, role), CONTENT]
        place = found.end()
    return numbers
