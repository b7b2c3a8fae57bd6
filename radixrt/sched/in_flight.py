"""InFlight: what is planned and not committed yet.

A device may run one step while the next is planned. Then planning goes by where a sequence will stand:

    tokens     [0 ... computed) committed | step k: [computed, stop) | step k + 1: the token that step k draws | ...
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import compress

from radixrt.errors import InvariantViolation
from radixrt.sched.plan import SEQUENCE, Chunk, ChunkResult
from radixrt.sched.sequence import Sequence

MAX_STEPS = 2  # one runs, one is planned behind it


class _Step:
    """The chunks of one step. By sequence they are asked for only while it is under way."""

    __slots__ = ("_by_sequence", "chunks")

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self._by_sequence: dict[Sequence, Chunk] | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether nobody can have taken a chunk out or put one in."""
        return self._by_sequence is None

    @property
    def by_sequence(self) -> dict[Sequence, Chunk]:
        """What of it counts. May be changed."""
        if self._by_sequence is None:
            self._by_sequence = dict(zip(map(SEQUENCE, self.chunks), self.chunks, strict=True))
        return self._by_sequence


class InFlight:
    """Own the planned steps, oldest first: the chunk of each sequence.

    Invariants: at most MAX_STEPS steps, none of them empty; a sequence's chunks follow one another, the first one starts
    at num_computed.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, chunks: list[Chunk]) -> None:
        """Take in the chunks of a planned step, if there are any."""
        if chunks:
            self._steps.append(_Step(chunks))

    def __bool__(self) -> bool:
        """Tell whether anything is under way."""
        return bool(self._steps)

    def has(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is under way and counts."""
        return any(step.by_sequence.get(chunk.sequence) is chunk for step in self._steps)

    def __contains__(self, sequence: Sequence) -> bool:
        """Tell whether anything of a sequence is under way."""
        return bool(self._steps) and any(sequence in step.by_sequence for step in self._steps)

    def take(self, chunks: Seq[Chunk], results: Seq[ChunkResult]) -> tuple[Seq[Chunk], Seq[ChunkResult]]:
        """Let go of the oldest step, which is over; give those of its chunks that were not dropped before.

        Raises:
            InvariantViolation: there is not one result for each chunk; nothing is changed.
        """
        if len(results) != len(chunks):
            raise InvariantViolation(f"a step of {len(chunks)} chunks gave {len(results)} results")
        if not self._steps or not chunks:
            return (), ()
        step = self._steps[0]
        if step.is_whole:
            if step.chunks[0] is not chunks[0]:
                return (), ()
        else:
            known = step.by_sequence
            counts = [known.get(chunk.sequence) is chunk for chunk in chunks]
            chunks, results = list(compress(chunks, counts)), list(compress(results, counts))
        if chunks:
            del self._steps[0]
        return chunks, results

    def replace(self, chunk: Chunk, settled: Chunk) -> bool:
        """Put a chunk of the oldest step in order; False when it was dropped before."""
        if not self._steps or self._steps[0].by_sequence.get(chunk.sequence) is not chunk:
            return False
        self._steps[0].by_sequence[chunk.sequence] = settled
        return True

    def drop(self, sequence: Sequence) -> None:
        """Let nothing of a sequence count that is under way."""
        if self._steps:
            for step in self._steps:
                step.by_sequence.pop(sequence, None)
            self._steps = [step for step in self._steps if step.by_sequence]

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Tell whether tokens of the prompt are still to be planned."""
        return self.pending(sequence).start < sequence.num_prompt_tokens

    def pending(self, sequence: Sequence) -> range:
        """Give the positions that can be planned now: after all that is under way, up to the tokens that there will be.

        Those are the tokens known, and those that steps under way draw. A last token, after which none may follow,
        need not be computed.
        """
        planned, num_total = sequence.num_computed, len(sequence.token_ids)
        if not self._steps:
            return range(planned, num_total)
        num_known = num_total
        for step in self._steps:
            if (chunk := step.by_sequence.get(sequence)) is not None:
                planned = chunk.stop
                if chunk.wants_sample and planned == num_total:
                    num_total += 1
        if num_total > num_known and num_total >= sequence.num_max_total:
            return range(planned, planned)
        return range(planned, num_total)

    def check(self) -> None:
        """Raise InvariantViolation unless the invariants hold."""
        if len(self._steps) > MAX_STEPS or not all(step.by_sequence for step in self._steps):
            raise InvariantViolation(f"{len(self._steps)} steps are under way")
        starts: dict[Sequence, int] = {}
        for step in self._steps:
            for sequence, chunk in step.by_sequence.items():
                start = starts.get(sequence, sequence.num_computed)
                if sequence.lease is None or chunk.start != start:
                    raise InvariantViolation(
                        f"a chunk of a {sequence.status} sequence starts at {chunk.start}, not at {start}"
                    )
                starts[sequence] = chunk.stop
