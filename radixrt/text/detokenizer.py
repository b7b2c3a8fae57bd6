"""Token ids to text deltas, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from radixrt.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and whether a stop string ended the text."""

    text: str
    is_stopped: bool


class Detokenizer:
    """The text of one sequence so far; owned by the sequence.

    Never gives half a character nor any part of a stop string. The stop string that is complete first wins; of
    those complete at the same character, the longest.

    Invariant: the texts of all deltas and of `finish` == decode(all ids), cut before that stop string, for every
    way to cut the ids into pushes; `shown_ids` decode to their names instead of to nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), shown_ids: Sequence[int] = ()
    ) -> None:
        self._vocab_bytes = tokenizer.vocab_bytes
        self._shown = {token_id: tokenizer.token_text(token_id).encode() for token_id in shown_ids}
        self._stop = stop
        self._max_held = max(map(len, stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not given yet: it may begin a stop string
        self._num_exempt = 0  # characters of `held` that came while stopping was not allowed
        self._allow_stop = True
        self._is_stopped = False

    def push(self, token_ids: Sequence[int], *, allow_stop: bool = True) -> TextDelta:
        """Take the next token ids and give the text that is certain.

        Args:
            allow_stop: False while `min_tokens` is not reached: a stop string that is complete by then is text.
        Cost: linear in the new bytes, times the number of stop strings.
        """
        self._allow_stop = allow_stop
        return self._advance(self._decoder.decode(self._bytes(token_ids)), is_last=False)

    def finish(self) -> str:
        """Give what is held back; broken UTF-8 becomes U+FFFD."""
        return self._advance(self._decoder.decode(b"", final=True), is_last=True).text

    def text_ends(self, token_ids: Sequence[int], places: Sequence[int]) -> list[int]:
        """Give how many characters the first `place` ids complete, for each place in ascending order. Pure."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends, at, num_characters = [], 0, 0
        for place in places:
            num_characters += len(decoder.decode(self._bytes(token_ids[at:place])))
            ends.append(num_characters)
            at = place
        return ends

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(
            self._vocab_bytes[token_id] or self._shown.get(token_id, b"") for token_id in token_ids
        )

    def _advance(self, new_text: str, *, is_last: bool) -> TextDelta:
        if self._is_stopped:
            return TextDelta("", True)
        text = self._held + new_text
        if not self._allow_stop:
            self._num_exempt = len(text)
        cut = self._stop_position(text)
        self._is_stopped = cut is not None
        if cut is None:
            cut = len(text) if is_last else len(text) - self._num_held(text)
        self._held = "" if self._is_stopped else text[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return TextDelta(text[:cut], self._is_stopped)

    def _stop_position(self, text: str) -> int | None:
        """Give where the winning stop string begins."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches)[1] if matches else None

    def _num_held(self, text: str) -> int:
        """Give the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
