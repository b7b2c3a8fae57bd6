"""From sequence updates to what a caller reads: chunks while a request runs, one output when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixrt.errors import EngineStopped
from radixrt.sched.plan import SequenceUpdate
from radixrt.sched.sequence import Sequence
from radixrt.text.detokenizer import Detokenizer
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import (
    FinishReason,
    ForcedSpan,
    GenerateRequest,
    GenerationOutput,
    Origin,
    OutputChunk,
    Sample,
    TokenLogprob,
    Usage,
)

Deliver = Callable[["OutputChunk | BaseException"], None]


class Delivery:
    """Own the detokenizers and the reader of one request; used by the engine's thread only.

    Invariant: `deliver` gets chunks, then exactly one last item: the chunk with the usage, or an error.

    Args:
        sequences: the request's samples in order.
        deliver: called in the engine's thread; must return soon. If it raises, the request is aborted.

    Attributes:
        is_done: the reader gets nothing any more.
    """

    def __init__(
        self, request: GenerateRequest, sequences: list[Sequence], tokenizer: Tokenizer, deliver: Deliver
    ) -> None:
        self.request = request
        self.sequences = sequences
        self.is_done = False
        self._deliver = deliver
        sampling = request.sampling
        self._detokenizers = [
            Detokenizer(
                tokenizer,
                stop=sampling.stop,
                shown_ids=sampling.shown_token_ids,
                call_marks=request.call_marks,
            )
            for _ in sequences
        ]
        self._num_open = len(sequences)
        self._has_begun = [False] * len(sequences)
        self._num_characters = [0] * len(sequences)

    def chunk(self, update: SequenceUpdate) -> OutputChunk:
        """Give what is to be handed to the reader of a sample's new tokens; a stop string among them may end the sample."""
        sequence = update.sequence
        index = sequence.sample_index
        text, is_stopped = self._detokenize(sequence, update.token_ids)
        reason = update.finish_reason
        if reason is not None:
            rest = self._detokenizers[index].finish()
            text, is_stopped = text + rest.text, rest.is_stopped
        if is_stopped:
            reason = FinishReason.STOP
        if reason is not None:
            self._num_open -= 1
        self._num_characters[index] += len(text)
        chunk = OutputChunk(
            sample_index=index,
            text=text,
            token_ids=update.token_ids,
            finish_reason=reason,
            logprobs=update.logprobs,
            prompt_logprobs=self._prompt_logprobs(sequence),
            usage=self._usage() if self._num_open == 0 else None,
            origin=None if reason is None else self._origin(sequence),
            queued_s=self.sequences[0].origin.queued_s if self._num_open == 0 else None,
        )
        self._has_begun[index] = True
        return chunk

    def hand(self, chunk: OutputChunk) -> None:
        """Hand a chunk to the reader. Changes: `is_done`, with the last one."""
        self.is_done = chunk.usage is not None
        self._deliver(chunk)

    def _detokenize(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[str, bool]:
        """Give new text, and whether a stop string that is complete after min_tokens ended it."""
        detokenizer = self._detokenizers[sequence.sample_index]
        first = sequence.num_delivered - len(token_ids)
        num_early = max(min(self.request.sampling.min_tokens - 1 - first, len(token_ids)), 0)
        early = detokenizer.push(token_ids[:num_early], allow_stop=False).text if num_early else ""
        delta = detokenizer.push(token_ids[num_early:])
        return early + delta.text, delta.is_stopped

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it is done."""
        if not self.is_done:
            self.is_done = True
            self._deliver(error)

    def _usage(self) -> Usage:
        """Count where the request's tokens came from, so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.sequences[0].num_cached,
            computed_tokens=sum(sequence.num_forwarded for sequence in self.sequences),
            forced_tokens=sum(sequence.num_forced for sequence in self.sequences),
            output_tokens=sum(sequence.num_output_tokens for sequence in self.sequences),
        )

    def _origin(self, sequence: Sequence) -> Origin:
        """Say how a sample that has ended came about, as far as its reader has its tokens and its text."""
        log, num_tokens = sequence.origin, sequence.num_delivered
        runs = [(start, min(stop, num_tokens)) for start, stop in log.runs if start < num_tokens]
        output_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        places = [place for run in runs for place in run]
        num_characters = self._num_characters[sequence.sample_index]
        ends = [
            min(end, num_characters)
            for end in self._detokenizers[sequence.sample_index].text_ends(output_ids, places)
        ]
        shares = [share for place, share in log.removed if place <= num_tokens]
        return Origin(
            forced=tuple(
                ForcedSpan(start, stop, text_start, text_stop)
                for (start, stop), text_start, text_stop in zip(runs, ends[::2], ends[1::2], strict=True)
            ),
            masked_share=sum(shares) / len(shares) if shares else None,
            num_measured=len(shares),
        )

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob, ...]:
        if self.request.sampling.prompt_logprobs is None or self._has_begun[sequence.sample_index]:
            return ()
        first = max(self.request.logprob_start, 1)
        return tuple(sequence.token_logprobs[at] for at in range(first, sequence.num_prompt_tokens))


class OutputCollector:
    """Put a request's chunks together again.

    Args:
        prompt_ids: of the request, for the output.
        clock: gives seconds; the output's `seconds` count from here to the last chunk.
    """

    def __init__(
        self, prompt_ids: tuple[int, ...], *, num_samples: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._prompt_ids = prompt_ids
        self._clock = clock
        self._started = clock()
        self._chunks: list[list[OutputChunk]] = [[] for _ in range(num_samples)]
        self._usage: Usage | None = None
        self._queued_s: float | None = None
        self._seconds = 0.0
        self._first_token_s: float | None = None

    def add(self, chunk: OutputChunk) -> bool:
        """Take a chunk; give whether it was the request's last."""
        self._chunks[chunk.sample_index].append(chunk)
        if self._first_token_s is None and chunk.token_ids:
            self._first_token_s = self._clock() - self._started
        if chunk.usage is not None:
            self._usage = chunk.usage
            self._queued_s = chunk.queued_s
            self._seconds = self._clock() - self._started
        return self._usage is not None

    def deliver_to(self, then: Callable[[GenerationOutput | BaseException], None]) -> Deliver:
        """Give a reader that takes every chunk where it is made and hands on the whole output, or the error, once.

        So whoever wants no more than that is woken once, and not for every token.
        """

        def deliver(item: OutputChunk | BaseException) -> None:
            if isinstance(item, BaseException):
                then(item)
                return
            try:
                found = self.output() if self.add(item) else None
            except BaseException as error:  # for the one who waits, and for the engine, which aborts
                then(error)
                raise
            if found is not None:
                then(found)

        return deliver

    def output(self) -> GenerationOutput:
        """Give the whole output.

        Raises:
            EngineStopped: the last chunk has not come.
        """
        if self._usage is None:
            raise EngineStopped("the output is not complete")
        return GenerationOutput(
            prompt_ids=self._prompt_ids,
            samples=tuple(_sample(chunks) for chunks in self._chunks),
            usage=self._usage,
            prompt_logprobs=self._chunks[0][0].prompt_logprobs,
            seconds=self._seconds,
            first_token_s=self._first_token_s,
            queued_s=self._queued_s,
        )


def _sample(chunks: list[OutputChunk]) -> Sample:
    reason = chunks[-1].finish_reason
    assert reason is not None
    return Sample(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=reason,
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        origin=chunks[-1].origin,
    )
