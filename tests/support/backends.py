"""A Backend without a model: it answers from a script, one character is one token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from frontend_lang import ScoredContinuation
from radixrt import (
    EngineStopped,
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    Origin,
    OutputChunk,
    Sample,
    TextPiece,
    ToolForm,
    Usage,
)

BOS, EOS = 0, 1
CONTROL = {"<|im_start|>": 2, "<|im_end|>": 3}
Answer = Callable[[GenerateRequest, str], str]


@dataclass
class ScriptedBackend:
    """Answer each generate with the next text of a script, or with a function of request and prompt text.

    Attributes:
        script: what to answer; its last item is repeated for ever.
        fail_at: the calls, counted from 0, that raise `error`.
        delay_s: how long each call takes.
        requests: every request, in order of arrival; running, most_running: calls at work, and their maximum.
        chunk_characters: how many characters a streamed chunk holds.
        open_scopes: scopes that are open; num_scopes: how many were ever opened.
        aborted: how many calls were cancelled while they ran.
        origin: what it tells of how a text came about; None = it does not tell.
        ends_with_eos: give the end-of-sequence token with every answer, as an engine does.
    """

    script: Sequence[str] | Answer = ("ok",)
    fail_at: frozenset[int] | set[int] = frozenset()
    delay_s: float = 0.0
    error: Exception = field(default_factory=lambda: EngineStopped("the engine died"))
    origin: Callable[[str], Origin | None] = lambda text: Origin()
    ends_with_eos: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    num_calls: int = 0
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    encoded: list[list[TextPiece]] = field(default_factory=list)
    chunk_characters: int = 1
    open_scopes: set[int] = field(default_factory=set)
    num_scopes: int = 0
    num_settled: int = 0
    form: ToolForm | None = None
    has_token_ids: bool = True
    transient_errors: tuple[type[Exception], ...] = ()

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return (BOS,)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS, CONTROL["<|im_end|>"]})

    @property
    def tool_form(self) -> ToolForm | None:
        return self.form

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool = False) -> list[int]:
        self.encoded.append(list(pieces))
        token_ids: list[int] = []
        for piece in pieces:
            rest = piece.text
            while rest:
                token = next(
                    (name for name in CONTROL if piece.is_template and rest.startswith(name)), rest[0]
                )
                token_ids.append(CONTROL.get(token, ord(token[0]) + 10))
                rest = rest[len(token) :]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id - 10) for token_id in token_ids if token_id >= 10)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        default = "<|im_start|>system\nHelp.<|im_end|>\n" if not history and role != "system" else ""
        return f"{default}<|im_start|>{role}\n", "<|im_end|>\n"

    def open_scope(self) -> int:
        self.num_scopes += 1
        self.open_scopes.add(self.num_scopes)
        return self.num_scopes

    def close_scope(self, scope_id: int) -> None:
        self.open_scopes.remove(scope_id)

    async def settle_scopes(self) -> None:
        """Note that somebody waited for it."""
        self.num_settled += 1

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """Give what `generate` gives, a few characters at a time, one sample after the other."""
        output = await self.generate(request)
        last = len(output.samples) - 1
        for index, sample in enumerate(output.samples):
            step = self.chunk_characters
            starts = range(0, max(len(sample.token_ids), 1), step)
            for start in starts:
                await asyncio.sleep(0)
                is_end = start == starts[-1]
                yield OutputChunk(
                    index,
                    sample.text[start : start + step],
                    sample.token_ids[start : start + step],
                    sample.finish_reason if is_end else None,
                    sample.logprobs[start : start + step],
                    usage=output.usage if is_end and index == last else None,
                    origin=sample.origin if is_end else None,
                )

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        """Answer; with n > 1 each sample is the next answer of the script."""
        index = await self._work(request)
        samples = [self._sample(request, index)]
        for _ in range(request.sampling.n - 1):
            self.requests.append(request)
            samples.append(self._sample(request, self._count()))
        num_output = sum(len(sample.token_ids) for sample in samples)
        usage = Usage(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=len(request.prompt_ids) - 1,
            computed_tokens=num_output,
            output_tokens=num_output,
        )
        return GenerationOutput(request.prompt_ids, tuple(samples), usage)

    def _count(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1

    def _sample(self, request: GenerateRequest, index: int) -> Sample:
        answer = self.script
        prompt = self.decode(request.prompt_ids)
        text = answer(request, prompt) if callable(answer) else answer[min(index, len(answer) - 1)]
        shown, reason = text, FinishReason.STOP
        for stop in request.sampling.stop:
            if stop in shown:
                shown = shown[: shown.index(stop)]
        is_cut = shown != text
        token_ids = self.encode([TextPiece(text[: len(shown) + 1] if is_cut else text)])
        if len(token_ids) > request.sampling.max_tokens:
            token_ids, reason = token_ids[: request.sampling.max_tokens], FinishReason.LENGTH
            shown = self.decode(token_ids)
        elif self.ends_with_eos and not is_cut:
            token_ids = [*token_ids, EOS]
        return Sample(shown, tuple(token_ids), reason, origin=self.origin(shown))

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        await self._work(GenerateRequest(tuple(prefix_ids), label=label))
        texts = [self.decode(continuation) for continuation in continuations]
        return [
            ScoredContinuation(
                tuple(self.scores.get(text, [-1.0] * len(text))), Usage(prompt_tokens=len(text))
            )
            for text in texts
        ]

    async def _work(self, request: GenerateRequest) -> int:
        index = self._count()
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        if index in self.fail_at:
            raise self.error
        return index
