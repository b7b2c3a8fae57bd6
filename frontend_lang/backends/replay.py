"""A backend without a model: it answers from a recording, to the bit, and refuses what was not recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from frontend_lang.backends.gathering import collected
from frontend_lang.backends.protocol import ScoredContinuation, call_site
from frontend_lang.backends.recording import RecordedCall, RecordedError, Recording, history_key
from frontend_lang.backends.values import (
    ERRORS,
    GenerateRequest,
    GenerationOutput,
    OutputChunk,
    RadixrtError,
    RequestAborted,
    RequestError,
    TextPiece,
    ToolForm,
)

NUM_SHOWN = 40  # characters of text around a difference

_BUILTIN_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ConnectionError,
        ConnectionResetError,
        OSError,
        RuntimeError,
        TimeoutError,
        TypeError,
        ValueError,
    )
}
_REQUEST = TypeAdapter(GenerateRequest)
Key = tuple[bytes, tuple[tuple[int, ...], ...]]


class NotRecorded(RadixrtError):
    """A replayed program asks for something that the recorded run did not ask for."""


class RecordedFailure(RadixrtError):
    """A recorded call failed by an error whose class this process does not know."""


class TransientFailure(RecordedFailure):
    """A recorded call failed by an error after which the runtime let it be sent again."""


class ReplayBackend:
    """Answer a program's calls from a recording. Owns the record of which answers were given.

    A call is looked up by what it asks (token ids, sampling, constraint, label); of several that ask the same, the one
    made at the same place in the program comes first, then the others in their recorded order. Each is given once.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._encoded = {(is_start, pieces): ids for is_start, pieces, ids in recording.encoded}
        self._decoded = dict(recording.decoded)
        self._opened = {
            (history, role): (prefix, suffix) for history, role, prefix, suffix in recording.opened
        }
        self._waiting: dict[Key, list[RecordedCall]] = {}
        for call in recording.calls:
            self._waiting.setdefault(_key(call.what, call.continuations), []).append(call)

    @classmethod
    def load(cls, path: str | Path) -> ReplayBackend:
        """Answer from a file that `Recording.save` or `Trace.save` wrote.

        Raises:
            InvalidRequest: not such a file, or of another version.
        """
        return cls(Recording.load(path))

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._recording.bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self._recording.eos_ids)

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        is_any = any(call.error is not None and call.error.is_transient for call in self._recording.calls)
        return (TransientFailure,) if is_any else ()

    @property
    def has_token_ids(self) -> bool:
        return self._recording.has_token_ids

    @property
    def unused(self) -> tuple[RecordedCall, ...]:
        """Give the recorded calls that nobody has asked for yet."""
        return tuple(call for calls in self._waiting.values() for call in calls)

    @property
    def tool_form(self) -> ToolForm | None:
        return self._recording.tool_form

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        key = (is_start, tuple(pieces))
        if key not in self._encoded:
            known = ["".join(piece.text for piece in pieces) for _, pieces in self._encoded]
            raise NotRecorded(_no_text("".join(piece.text for piece in pieces), known))
        return list(self._encoded[key])

    def decode(self, token_ids: Sequence[int]) -> str:
        if tuple(token_ids) not in self._decoded:
            raise NotRecorded(f"the recorded run did not decode the token ids {list(token_ids)[:20]}")
        return self._decoded[tuple(token_ids)]

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        key = (history_key(history), role)
        if key not in self._opened:
            told = "".join(f"{name}: {content}\n" for name, content in key[0]) + f"{role}:"
            known = [
                "".join(f"{name}: {content}\n" for name, content in history) + f"{role}:"
                for history, role in self._opened
            ]
            raise NotRecorded(_no_text(told, known))
        return self._opened[key]

    def open_scope(self) -> int | None:
        return None

    def close_scope(self, scope_id: int) -> None:
        """Do nothing: there are no scopes here."""

    async def settle_scopes(self) -> None:
        """Do nothing: there are no scopes here."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        call = self._take(request, ())
        for chunk in call.chunks:
            yield chunk
        if call.error is not None:
            raise _error(call.error)

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        return await collected(request, self.stream(request))

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        request = GenerateRequest(tuple(prefix_ids), label=label)
        call = self._take(request, tuple(tuple(ids) for ids in continuations))
        if call.error is not None:
            raise _error(call.error)
        return list(call.scores)

    def _take(self, request: GenerateRequest, continuations: tuple[tuple[int, ...], ...]) -> RecordedCall:
        asked = RecordedCall(call_site.get(), request, continuations)
        waiting = self._waiting.get(_key(asked.what, continuations), [])
        if not waiting:
            raise NotRecorded(self._difference(asked))
        call = next((call for call in waiting if call.site == asked.site), waiting[0])
        waiting.remove(call)
        return call

    def _difference(self, asked: RecordedCall) -> str:
        """Say how a call differs from the nearest recorded one."""
        kind = "scoring" if asked.continuations else "generation"
        of_kind = [
            call for call in self._recording.calls if bool(call.continuations) == bool(asked.continuations)
        ]
        if not of_kind:
            return f"the recorded run holds no {kind} at all"
        nearest = max(
            of_kind, key=lambda call: (_num_shared(_tokens(call), _tokens(asked)), call.site == asked.site)
        )
        return f"the recorded run holds no such {kind}; the nearest one, at {nearest.site}, {self._how(asked, nearest)}"

    def _how(self, asked: RecordedCall, nearest: RecordedCall) -> str:
        told, known = _tokens(asked), _tokens(nearest)
        if told != known:
            place = _num_shared(told, known)
            return f"differs at token {place}: recorded {self._shown(known, place)}, now {self._shown(told, place)}"
        if asked.continuations != nearest.continuations:
            return "scored other texts after the same prefix"
        for name, now, before in _differing(asked.what, nearest.what):
            return f"has the same prompt but {name}={before!r}, now {now!r}"
        return "asks the same, but its answer has been given: each recorded call answers once"

    def _shown(self, token_ids: Sequence[int], place: int) -> str:
        """Show the tokens from a place on, as text where the recording knows it."""
        if place >= len(token_ids):
            return "the end"
        rest = tuple(token_ids[place : place + 8])
        text = self._text_at(token_ids, place)
        return f"{list(rest)}" if text is None else f"{list(rest)} ({text[:NUM_SHOWN]!r})"

    def _text_at(self, token_ids: Sequence[int], place: int) -> str | None:
        """Give the text that was encoded to the ids around a place, when there is one."""
        for (_, pieces), ids in self._encoded.items():
            for start in range(max(place - len(ids) + 1, 0), place + 1):
                if ids and tuple(token_ids[start : start + len(ids)]) == ids:
                    text = "".join(piece.text for piece in pieces)
                    return "..." + text if start == place else f"in {text!r}"
        return None


def _key(request: GenerateRequest, continuations: tuple[tuple[int, ...], ...]) -> Key:
    return _REQUEST.dump_json(request), continuations


def _tokens(call: RecordedCall) -> tuple[int, ...]:
    return call.request.prompt_ids


def _num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def _differing(asked: GenerateRequest, recorded: GenerateRequest) -> list[tuple[str, Any, Any]]:
    """Give (name, now, recorded) of the options that differ, sampling ones first. Pure."""
    pairs: list[tuple[Any, Any]] = [(asked.sampling, recorded.sampling), (asked, recorded)]
    return [
        (item.name, getattr(now, item.name), getattr(before, item.name))
        for now, before in pairs
        for item in fields(now)
        if item.name != "sampling" and getattr(now, item.name) != getattr(before, item.name)
    ]


def _no_text(text: str, known: Sequence[str]) -> str:
    if not known:
        return f"the recorded run holds no text, asked for {text[:NUM_SHOWN]!r}"
    nearest = max(known, key=lambda other: _num_shared(text, other))
    place = _num_shared(text, nearest)
    if text == nearest:
        return f"the recorded run sent this text in another place or role: {text[:NUM_SHOWN]!r}"
    start = max(place - NUM_SHOWN // 2, 0)
    before, now = (other[start : place + NUM_SHOWN // 2] for other in (nearest, text))
    return (
        "the recorded run did not send this text; the nearest one differs at character "
        f"{place}: recorded {before!r}, now {now!r}"
    )


def _error(recorded: RecordedError) -> Exception:
    """Make the exception again, of its own class where that can be."""
    if recorded.is_transient:
        return TransientFailure(f"{recorded.kind}: {recorded.message}")
    if recorded.kind == "CancelledError":
        return RequestAborted("the recorded call was cancelled")
    kind = ERRORS.get(recorded.kind) or _BUILTIN_ERRORS.get(recorded.kind)
    if kind is None:
        return RecordedFailure(f"{recorded.kind}: {recorded.message}")
    if issubclass(kind, RequestError):
        return kind(recorded.message, parameter=recorded.parameter or "")
    return kind(recorded.message)
