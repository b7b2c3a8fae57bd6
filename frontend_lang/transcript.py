"""The token-exact transcript of a branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from frontend_lang.backends import (
    Backend,
    FinishReason,
    InvalidRequest,
    Origin,
    Sample,
    SamplingParams,
    TextPiece,
)
from frontend_lang.backends.unicode import check_unicode

_MOST_HEALED_TOKENS = 4  # a character has at most 4 bytes, so at most so many tokens
_HEAL_WINDOW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Healed:
    """What was taken back from the end of a prompt for the model to write again, perhaps as a longer token."""

    text: str = ""


NOT_HEALED = Healed()


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a transcript.

    Attributes:
        is_template: text of the chat template, or control text.
        call_index: the call that wrote it (CallRecord.index); None = the program did.
    """

    text: str
    is_template: bool = False
    call_index: int | None = None


class Transcript:
    """Own what was sent and received, as token ids.

    Text waits as pieces until ids are needed and is then encoded once, together with its neighbours. Generated
    ids are kept as they came and never encoded again, so every call's prompt is an exact extension of the last.

        ids: [ encoded text | generated | encoded text | generated ]  pieces: text not yet encoded

    Invariants: an id, once in `ids`, never changes, but for those that `heal` takes back; `text` is all text in order,
    template included.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._pieces: list[TextPiece] = []
        self._segments: list[Segment] = []
        self._num_inherited = 0  # of _segments, from before the fork
        self._messages: list[dict[str, str]] = []
        self._open_role: str | None = None
        self._role_start = 0  # index into _segments of the open message's content
        self._role_suffix = ""
        self.marks: dict[object, int] = {}  # places in the text that a program named, as `num_texts`
        self._end = ""  # plain text at the end of _ids, as far as it was encoded from a piece

    @property
    def num_texts(self) -> int:
        """Give a mark for `text_since`."""
        return len(self._segments)

    def text_since(self, mark: int) -> str:
        """Give the text added since `num_texts` was `mark`."""
        return "".join(segment.text for segment in self._segments[mark:])

    @property
    def text(self) -> str:
        """Give everything so far as text."""
        return "".join(segment.text for segment in self._segments)

    @property
    def num_inherited(self) -> int:
        """Give how many segments were there before the fork."""
        return self._num_inherited

    @property
    def own_segments(self) -> tuple[Segment, ...]:
        """Give what this branch added since its fork, in order."""
        return tuple(self._segments[self._num_inherited :])

    @property
    def messages(self) -> list[dict[str, str]]:
        """Give the chat messages so far, the open one included."""
        open_message = [] if self._open_role is None else [self._message(self._open_role)]
        return [dict(message) for message in [*self._messages, *open_message]]

    def token_ids(self) -> tuple[int, ...]:
        """Encode the text that waits and give all ids."""
        if self._pieces:
            is_start = not self._ids
            if is_start and not self._pieces[0].is_template:
                self._ids += self._backend.bos_ids
            self._ids += self._backend.encode(self._pieces, is_start=is_start)
            self._end = "" if self._pieces[-1].is_template else self._pieces[-1].text
            self._pieces = []
        elif not self._ids:
            self._ids += self._backend.bos_ids
        return tuple(self._ids)

    def told_ids(self) -> tuple[int, ...]:
        """Give all ids to the program.

        Raises:
            InvalidRequest: the runtime has none that mean anything.
        """
        if not self._backend.has_token_ids:
            raise InvalidRequest("this runtime tells no token ids", parameter="token_ids")
        return self.token_ids()

    def heal(self) -> Healed:
        """Take back the last token of the prompt, for the model to write its text again.

        Only a token of plain text, never one that the model wrote or the template; never the only one. It is as many
        tokens as make whole characters. Where that cannot be, nothing is taken back.
        """
        ids = self.token_ids()
        window = ids[-_HEAL_WINDOW_TOKENS:]
        whole = self._backend.decode(window)
        for num_dropped in range(1, min(_MOST_HEALED_TOKENS, len(window) - 1) + 1):
            kept = self._backend.decode(window[:-num_dropped])
            dropped = whole[len(kept) :]
            if dropped and whole.startswith(kept) and self._end.endswith(dropped):
                del self._ids[-num_dropped:]
                self._end = ""
                return Healed(dropped)
        return Healed()

    def add_text(self, text: str, *, is_template: bool = False) -> None:
        """Append text; it is encoded when ids are next needed.

        Raises:
            InvalidRequest: a lone surrogate.
        """
        if not text:
            return
        check_unicode(text, "text")
        self._segments.append(Segment(text, is_template))
        if self._pieces and self._pieces[-1].is_template == is_template:
            text = self._pieces.pop().text + text
        self._pieces.append(TextPiece(text, is_template))

    def mark(self, call_index: int) -> None:
        """Note the place of a call that writes nothing."""
        self._segments.append(Segment("", call_index=call_index))

    def add_generated(
        self,
        token_ids: Sequence[int],
        text: str,
        *,
        call_index: int,
        is_cut: bool = False,
        healed: Healed = NOT_HEALED,
    ) -> None:
        """Append generated tokens, which follow `token_ids()`.

        Args:
            call_index: of the call that wrote them.
            healed: what `heal` took back; `text` starts with it again, the transcript's text has it already.
            is_cut: a stop text may have been cut off, so that the ids say more than `text`: the tokens beyond it
                are dropped, and what a token in the middle of the cut says within `text` becomes text again.
        """
        kept = self._within(token_ids, text) if is_cut else token_ids
        self._ids += kept
        self._end = ""
        self._segments.append(Segment(text[len(healed.text) :], call_index=call_index))
        if is_cut and (rest := text[len(self._backend.decode(kept)) :]):
            self._pieces.append(TextPiece(rest))

    def add_sample(
        self, sample: Sample, sampling: SamplingParams, healed: Healed, call_index: int
    ) -> dict[str, Any]:
        """Append what the model wrote, without the token that ended it; give it as fields of a CallRecord.

        Raises:
            ValueError: it was cut off before it had written again what was taken back for healing.
        """
        if not sample.text.startswith(healed.text):
            raise ValueError(f"the text was cut off before it began with {healed.text!r} (max_tokens)")
        token_ids, is_stopped = sample.token_ids, sample.finish_reason is FinishReason.STOP
        if is_stopped and token_ids and token_ids[-1] in self._backend.eos_ids.union(sampling.stop_token_ids):
            token_ids = token_ids[:-1]
        is_cut = is_stopped and bool(sampling.stop)
        self.add_generated(token_ids, sample.text, call_index=call_index, is_cut=is_cut, healed=healed)
        return {
            "token_ids": token_ids,
            "text": sample.text[len(healed.text) :],
            "finish_reason": sample.finish_reason,
            "logprobs": sample.logprobs,
            "origin": _behind(sample.origin, len(healed.text)),
        }

    def open_role(self, role: str) -> None:
        """Begin a chat message; one that is still open (a branch forked inside it) ends first."""
        self.close_role()
        prefix, suffix = self._backend.open_role(self._messages, role)
        self.add_text(prefix, is_template=True)
        self._open_role, self._role_start, self._role_suffix = role, len(self._segments), suffix

    def close_role(self) -> None:
        """End the open chat message, if there is one."""
        if self._open_role is None:
            return
        self._messages.append(self._message(self._open_role))
        self._open_role = None
        self.add_text(self._role_suffix, is_template=True)

    def copy(self) -> Transcript:
        """Give an independent transcript with the same content."""
        other = Transcript.__new__(Transcript)
        other.__dict__.update(self.__dict__)
        other._ids, other._pieces, other._segments = self._ids[:], self._pieces[:], self._segments[:]
        other._messages = self._messages[:]
        other._num_inherited = len(self._segments)
        other.marks = {}
        return other

    def _message(self, role: str) -> dict[str, str]:
        return {
            "role": role,
            "content": "".join(segment.text for segment in self._segments[self._role_start :]),
        }

    def _within(self, token_ids: Sequence[int], text: str) -> Sequence[int]:
        """Give the most leading ids whose text is a start of `text`."""
        for num_kept in range(len(token_ids), 0, -1):
            if text.startswith(self._backend.decode(token_ids[:num_kept])):
                return token_ids[:num_kept]
        return []


def _behind(origin: Origin | None, num_characters: int) -> Origin | None:
    """Count the places in a text from a later character on. Pure."""
    if origin is None or num_characters == 0:
        return origin
    spans = [
        replace(
            span,
            text_start=max(span.text_start - num_characters, 0),
            text_stop=max(span.text_stop - num_characters, 0),
        )
        for span in origin.forced
    ]
    return replace(origin, forced=tuple(spans))
