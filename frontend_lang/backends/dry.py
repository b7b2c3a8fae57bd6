"""A backend that sends nothing: every call gets a stand-in, so that the prompts of a program can be read first."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence

from frontend_lang.backends.protocol import Backend, ScoredContinuation
from frontend_lang.backends.values import (
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    GrammarSpec,
    OutputChunk,
    RadixrtError,
    Sample,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    ToolForm,
    Usage,
)


class DryRunEnds(RadixrtError):
    """A dry run comes to a call whose value only the model can give."""


class DryBackend:
    """Encode and render as another backend does, and answer every call with a stand-in.

    A gen without a constraint gives its own name in brackets, "⟨answer⟩"; one with choices the first of them, as
    select and decide do. Any other constraint has no stand-in that would be honest: there the program ends with DryRunEnds,
    unless `answers` has a text for it. Owns the list of the stand-ins it gave.

    Args:
        answers: call name -> what to answer instead.
    """

    transient_errors: tuple[type[Exception], ...] = ()

    def __init__(self, backend: Backend, answers: Mapping[str, str] | None = None) -> None:
        self._backend = backend
        self._answers = dict(answers or {})
        self.stand_ins: list[str] = []

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._backend.bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._backend.eos_ids

    @property
    def has_token_ids(self) -> bool:
        return self._backend.has_token_ids

    @property
    def tool_form(self) -> ToolForm | None:
        return self._backend.tool_form

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        return self._backend.encode(pieces, is_start=is_start)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        return self._backend.open_role(history, role)

    def open_scope(self) -> int | None:
        return None

    def close_scope(self, scope_id: int) -> None:
        """Do nothing: there are no scopes here."""

    async def settle_scopes(self) -> None:
        """Do nothing: there are no scopes here."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        output = await self.generate(request)
        last = len(output.samples) - 1
        for index, sample in enumerate(output.samples):
            usage = output.usage if index == last else None
            yield OutputChunk(
                index, sample.text, sample.token_ids, sample.finish_reason, sample.logprobs, usage=usage
            )

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        text = self._answer(request.label, request.sampling.grammar)
        token_ids = tuple(self._backend.encode([TextPiece(text)], is_start=False))
        logprobs = _logprobs(token_ids, request.sampling)
        samples = (Sample(text, token_ids, FinishReason.STOP, logprobs),) * request.sampling.n
        return GenerationOutput(request.prompt_ids, samples, Usage(prompt_tokens=len(request.prompt_ids)))

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        texts = [self._backend.decode(continuation) for continuation in continuations]
        chosen = self._answers.get(label, texts[0])
        self.stand_ins.append(chosen)
        usage = Usage(prompt_tokens=len(prefix_ids))
        return [
            ScoredContinuation((0.0 if text == chosen else -1.0,) * len(ids), usage)
            for text, ids in zip(texts, continuations, strict=True)
        ]

    def _answer(self, label: str, grammar: GrammarSpec | None) -> str:
        if label in self._answers:
            answer = self._answers[label]
        elif grammar is None:
            answer = f"⟨{label or 'gen'}⟩"
        elif grammar.kind == "choice":
            answer = json.loads(grammar.text)[0]
        else:
            raise DryRunEnds(
                f"the value of {label or 'this call'} ({grammar.kind.value}) is the model's to give; to see what "
                f"follows, answer for it: DryBackend(backend, answers={{{label!r}: ...}})"
            )
        self.stand_ins.append(answer)
        return answer


def _logprobs(token_ids: Sequence[int], sampling: SamplingParams) -> tuple[TokenLogprob, ...]:
    """Give log-probabilities that know nothing: all tokens are alike, so a decision takes its first answer. Pure."""
    if sampling.logprobs is None:
        return ()
    return tuple(
        TokenLogprob(token_id, 0.0, tuple((other, 0.0) for other in sampling.logprob_token_ids))
        for token_id in token_ids
    )
