"""The values that travel between the rooms: frozen, checked once, plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from radixrt.constraints import GrammarKind as GrammarKind
from radixrt.constraints import GrammarSpec as GrammarSpec
from radixrt.constraints import StructuralTag as StructuralTag
from radixrt.constraints import check_choices as check_choices
from radixrt.errors import DeadlineExceeded, InvalidRequest

MAX_TOKENS_LIMIT = 1 << 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024

TokenIds = Sequence[int]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop string, stop token or complete grammar
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the caller gave up


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Ranges are checked once, here.

    Attributes:
        max_tokens: most new tokens, 1 to 2**20.
        min_tokens: no end of sequence, stop token or stop string before this many new tokens.
        temperature: 0 is greedy; at most 100.
        top_p: keep the smallest set of tokens whose probability reaches this, (0, 1].
        top_k: keep this many tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest, [0, 1].
        repetition_penalty: divides (multiplies when negative) logits of tokens already seen, [0.01, 10]: with much
            less they would not stay finite.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence in the output, [-2, 2].
        logit_bias: token id -> number added to its logit, [-100, 100].
        stop: strings that end the text; not part of it.
        stop_token_ids: token ids that end the sequence; not part of the text.
        n: number of samples; they share the prompt's pages.
        seed: the same seed gives the same tokens whatever else runs. None draws one.
        logprobs: None, or how many alternatives to report per new token besides the chosen one, 0 to 20.
            Natural logarithms of the model's own distribution, before temperature, penalties and masks.
        logprob_token_ids: ids whose logprobs are reported too, after the likeliest, in this order; needs logprobs.
        prompt_logprobs: the same for prompt tokens from `GenerateRequest.logprob_start` on.
        ignore_eos: go on after an end-of-sequence token.
        grammar: constraint on the new text.
        shown_token_ids: control tokens whose names are part of the text, where others have no text: what reads
            tool calls needs to see them.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    shown_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop  # one string is accepted for a list of one
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _tuple("stop", stop))
        for name in ("stop_token_ids", "logprob_token_ids", "shown_token_ids"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        for name in ("logprob_token_ids", "shown_token_ids"):
            _check_int(f"number of {name}", len(getattr(self, name)), 0, MAX_LOGIT_BIAS)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", parameter="logprob_token_ids")
        if type(self.logit_bias) is not dict and not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                "logit_bias must map token ids to numbers", parameter="logit_bias", value=self.logit_bias
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, MAX_TOKENS_LIMIT)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_stop(self.stop, self.stop_token_ids)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}",
                parameter="logit_bias",
                value=len(self.logit_bias),
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, (1 << 31) - 1, of="a token id in logit_bias")
            _check_number("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be a bool", parameter="ignore_eos", value=self.ignore_eos)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise InvalidRequest(
                "grammar must be a GrammarSpec, e.g. GrammarSpec.regex(...)",
                parameter="grammar",
                value=self.grammar,
            )
        if self.stop and self.grammar is not None and self.grammar.on_unsupported == "check":
            raise InvalidRequest(
                'stop must be empty under a grammar with on_unsupported="check": it would cut off the checked value',
                parameter="stop",
                value=self.stop,
            )

    @property
    def is_greedy(self) -> bool:
        """Tell whether the likeliest token is always taken."""
        return self.temperature == 0


def _tuple(parameter: str, values: object) -> tuple[Any, ...]:
    if type(values) is tuple:  # nearly always, and asking an abstract class takes ten times as long
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidRequest(f"{parameter} must be a list", parameter=parameter, value=values)
    return tuple(values)


def _check_int(parameter: str, value: object, low: int, high: int, *, of: str = "") -> None:
    if type(value) is int and low <= value <= high:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            f"{of or parameter} must be a whole number in [{low}, {high}], got {value!r}",
            parameter=parameter,
            value=value,
        )


def _check_type(parameter: str, value: object, kind: type) -> None:
    if type(value) is kind:
        return
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str | bytes)):
        raise InvalidRequest(
            f"{parameter} must be a {kind.__name__}, got {type(value).__name__}",
            parameter=parameter,
            value=value,
        )


def _check_number(parameter: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{parameter} must be in {bracket}{low:g}, {high:g}], got {value!r}",
            parameter=parameter,
            value=value,
        )


def _check_stop(stop: tuple[Any, ...], stop_token_ids: tuple[Any, ...]) -> None:
    for parameter, values in (("stop", stop), ("stop_token_ids", stop_token_ids)):
        if len(values) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"{parameter} must have at most {MAX_STOP_STRINGS} entries, got {len(values)}",
                parameter=parameter,
                value=len(values),
            )
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {text!r}",
                parameter="stop",
                value=text,
            )
    for token_id in stop_token_ids:
        _check_int("stop_token_ids", token_id, 0, (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Separate prefix caches: nothing is shared or counted across namespaces.

    A salt equal to an adapter's name does not collide with it: they are different fields.
    """

    salt: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("salt", "adapter"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(
                    f"{name} must be a string or None, got {getattr(self, name)!r}",
                    parameter=name,
                    value=getattr(self, name),
                )


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How tool calls stand in an answer.

    Attributes:
        begin: what begins a call.
        num_before_json: how much of it, in characters, is surely before the call's JSON.
        opener: the bracket with which the JSON opens; the first one.
        end: what stands between the JSON's last bracket and the call's end.
    """

    begin: str
    num_before_json: int
    opener: Literal["{", "["]
    end: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, already encoded.

    Attributes:
        prompt_ids: at least one token id, each in [0, vocab_size).
        sampling: how to choose tokens.
        namespace: whose prefix cache to use.
        priority: larger is more urgent; only the `priority` policies read it.
        latency_class: "latency" requests have the engine's ttft_ms and tpot_ms targets, "throughput" ones have
            none and fill what is left.
        logprob_start: first prompt position whose logprob is wanted (prompt_logprobs); at least 1 has a value.
            Only positions before it can be served from the prefix cache.
        label: a name for reports, e.g. the call's name in a program; output lengths are learned per label.
        scope_id: an open scope of the engine that keeps this request's prefix.
        owner: who asks: whose share of the memory for compiled constraints the request's constraint counts for.
        timeout_s: seconds after which the request ends with DeadlineExceeded; None = never.
        call_marks: stop strings end the text around the calls that these marks show, and have no say inside them.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    latency_class: Literal["latency", "throughput"] = "latency"
    logprob_start: int = 0
    label: str = ""
    scope_id: int | None = None
    owner: str = ""
    timeout_s: float | None = None
    call_marks: CallMarks | None = None

    def __post_init__(self) -> None:
        if type(self.prompt_ids) is not tuple:
            _check_type("prompt", self.prompt_ids, Sequence)
        _check_type("sampling", self.sampling, SamplingParams)
        _check_type("namespace", self.namespace, Namespace)
        _check_type("label", self.label, str)
        _check_type("owner", self.owner, str)
        _check_int("priority", self.priority, -(1 << 31), (1 << 31) - 1)
        _check_int("logprob_start", self.logprob_start, 0, (1 << 31) - 1)
        if self.latency_class not in ("latency", "throughput"):
            raise InvalidRequest(
                f'latency_class must be "latency" or "throughput", got {self.latency_class!r}',
                parameter="latency_class",
                value=self.latency_class,
            )
        if self.scope_id is not None:
            _check_int("scope_id", self.scope_id, 0, (1 << 63) - 1)
        if self.timeout_s is not None:
            _check_number("timeout_s", self.timeout_s, 0.0, 1e9, open_low=True)
        if self.call_marks is not None:
            _check_type("call_marks", self.call_marks, CallMarks)

    def after(self, seconds: float) -> GenerateRequest:
        """Give the request as it is some time later: with less time left. Pure.

        Raises:
            DeadlineExceeded: its time is up.
        """
        if self.timeout_s is None:
            return self
        if seconds >= self.timeout_s:
            raise DeadlineExceeded()
        return replace(self, timeout_s=self.timeout_s - seconds)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural-log probability and its likeliest alternatives, best first, then those of logprob_token_ids."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a request's tokens came from.

    prompt_tokens == cached_tokens + computed prompt tokens, for each sample alone.

    Attributes:
        prompt_tokens: length of the prompt (counted once, also for n > 1).
        cached_tokens: prompt tokens of the first sample whose KV was already in pages.
        computed_tokens: positions that went through the model for this request, output included, all samples.
        forced_tokens: output tokens that the grammar forced, so that no forward pass sampled them.
        output_tokens: new tokens, all samples.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    forced_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ForcedSpan:
    """A run of one sample's output that was not sampled: the constraint left no choice about it.

    What a constraint completes an answer with, because max_tokens would not have sufficed otherwise, is such a run too.

    Attributes:
        start, stop: the tokens, [start, stop) of the sample's token_ids.
        text_start, text_stop: the characters that these tokens completed, [text_start, text_stop) of the sample's text.
    """

    start: int
    stop: int
    text_start: int
    text_stop: int


@dataclass(frozen=True, slots=True)
class Origin:
    """How one sample's output came about.

    Attributes:
        forced: the runs that were not sampled, in order; they do not touch.
        masked_share: mean share of the model's probability that the constraint took away where a token was sampled,
            0 to 1; None where it was not measured, as without a constraint.
        num_measured: how many tokens that is the mean of: the first 4 that were sampled, then one in 16.
    """

    forced: tuple[ForcedSpan, ...] = ()
    masked_share: float | None = None
    num_measured: int = 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of one sample's output.

    The texts of a sample's chunks add up to the decoding of all its token ids less the stop text;
    exactly one chunk per sample has a finish_reason, its last.

    Attributes:
        sample_index: which of the n samples, from 0.
        text: new text; never half a character.
        token_ids: new token ids.
        logprobs: one entry per token id when asked for, else empty.
        prompt_logprobs: on a sample's first chunk when asked for: one entry per prompt position from
            max(logprob_start, 1) on.
        usage: on the request's last chunk only.
        origin: on a sample's last chunk only; None there too where the runtime does not tell.
        queued_s: on the request's last chunk only: seconds from its submission to the step that admitted its first
            sample; None there too where the runtime does not tell.
    """

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    origin: Origin | None = None
    queued_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One whole output of a request.

    Attributes:
        origin: how it came about; None where the runtime does not tell.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The result of one request; text, token_ids, finish_reason, logprobs and origin are those of sample 0.

    Attributes:
        seconds: from the request to its end.
        first_token_s: from the request to its first token; None when nobody looked or no token came.
        queued_s: of these, until the engine began with it; None where the runtime does not tell.
    """

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    seconds: float = 0.0
    first_token_s: float | None = None
    queued_s: float | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.samples[0].logprobs

    @property
    def origin(self) -> Origin | None:
        return self.samples[0].origin


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of prompt text before encoding.

    Attributes:
        text: the characters.
        is_template: True for text of the model's own chat template or of the program's author, where control
            tokens ("<|im_end|>") mean themselves; False for content, where they are plain characters.
    """

    text: str
    is_template: bool = False
