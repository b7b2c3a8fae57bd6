"""InFlight: what is planned and not committed yet.

A device may run one step while the next is planned. Then planning goes by where a sequence will stand:

    tokens     [0 ... computed) committed | step k: [computed, stop) | step k + 1: the token that step k draws | ...
"""

from __future__ import annotations

from radixrt.errors import InvariantViolation
from radixrt.sched.plan import Chunk
from radixrt.sched.sequence import Sequence

MAX_STEPS = 2  # one runs, one is planned behind it


class InFlight:
    """Own the planned chunks of each sequence, oldest first.

    Invariants: a sequence's chunks follow one another, the first one starts at num_computed; at most MAX_STEPS of them.
    """

    def __init__(self) -> None:
        self._chunks: dict[Sequence, list[Chunk]] = {}

    def add(self, chunk: Chunk) -> None:
        """Take in a planned chunk."""
        self._chunks.setdefault(chunk.sequence, []).append(chunk)

    def has(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is under way and counts."""
        return any(item is chunk for item in self._chunks.get(chunk.sequence, ()))

    def __contains__(self, sequence: Sequence) -> bool:
        """Tell whether anything of a sequence is under way."""
        return sequence in self._chunks

    def take(self, chunk: Chunk) -> bool:
        """Let go of a chunk whose step is over; False when it was dropped before."""
        chunks = self._chunks.get(chunk.sequence)
        if not chunks or chunks[0] is not chunk:
            return False
        if len(chunks) == 1:
            del self._chunks[chunk.sequence]
        else:
            del chunks[0]
        return True

    def replace(self, chunk: Chunk, settled: Chunk) -> bool:
        """Put a sequence's oldest chunk in order; False when it was dropped before."""
        chunks = self._chunks.get(chunk.sequence)
        if not chunks or chunks[0] is not chunk:
            return False
        chunks[0] = settled
        return True

    def drop(self, sequence: Sequence) -> None:
        """Let nothing of a sequence count that is under way."""
        self._chunks.pop(sequence, None)

    def num_planned(self, sequence: Sequence) -> int:
        """Give how many tokens will be computed when all that is under way is done."""
        chunks = self._chunks.get(sequence)
        return chunks[-1].stop if chunks else sequence.num_computed

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Tell whether tokens of the prompt are still to be planned."""
        return self.num_planned(sequence) < sequence.num_prompt_tokens

    def num_total(self, sequence: Sequence) -> int:
        """Give how many tokens there will be: those known, and those that steps under way draw."""
        num_total = sequence.num_total
        for chunk in self._chunks.get(sequence, ()):
            if chunk.wants_sample and chunk.stop == num_total:
                num_total += 1
        return num_total

    def num_pending(self, sequence: Sequence) -> int:
        """Give how many tokens can be planned now; a last token, after which none may follow, need not be computed."""
        chunks = self._chunks.get(sequence)
        if not chunks:
            return sequence.num_pending
        num_total = self.num_total(sequence)
        if num_total > sequence.num_total and num_total >= sequence.num_max_total:
            return 0
        return num_total - chunks[-1].stop

    def check(self) -> None:
        """Raise InvariantViolation unless the invariants hold."""
        for sequence, chunks in self._chunks.items():
            start = sequence.num_computed
            if sequence.lease is None or len(chunks) > MAX_STEPS:
                raise InvariantViolation(
                    f"{len(chunks)} chunks of a {sequence.status} sequence are under way"
                )
            for chunk in chunks:
                if chunk.start != start:
                    raise InvariantViolation(f"a chunk starts at {chunk.start}, not at {start}")
                start = chunk.stop
