"""Token ids to text deltas, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from radixrt.text.stopping import StopStrings, StopStringsAroundCalls, TextDelta
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import CallMarks


class Detokenizer:
    """The text of one sequence so far; owned by the sequence.

    Never gives half a character, nor any part of the stop string that ends the text: see StopStrings, and with `call_marks`
    StopStringsAroundCalls.

    Invariant: the texts of all deltas and of `finish` == decode(all ids), cut before that stop string, for every
    way to cut the ids into pushes; `shown_ids` decode to their names instead of to nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        shown_ids: Sequence[int] = (),
        call_marks: CallMarks | None = None,
    ) -> None:
        self._vocab_bytes = tokenizer.vocab_bytes
        self._shown = {token_id: tokenizer.token_text(token_id).encode() for token_id in shown_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = (
            StopStringsAroundCalls(stop, call_marks) if stop and call_marks is not None else StopStrings(stop)
        )
        self._allow_stop = True

    def push(self, token_ids: Sequence[int], *, allow_stop: bool = True) -> TextDelta:
        """Take the next token ids and give the text that is certain.

        Args:
            allow_stop: False while `min_tokens` is not reached: a stop string that is complete by then is text.
        Cost: linear in the new bytes, times the number of stop strings.
        """
        self._allow_stop = allow_stop
        return self._stops.push(self._decoder.decode(self._bytes(token_ids)), allow_stop=allow_stop)

    def finish(self) -> TextDelta:
        """Give what is held back; broken UTF-8 becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        return self._stops.push(rest, allow_stop=self._allow_stop, is_last=True)

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
