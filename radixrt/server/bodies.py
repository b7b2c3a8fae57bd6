"""What requests have in common, field by field. A field that is accepted and has no effect here says why."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixrt.constraints import MAX_CHOICES
from radixrt.server.reading import Body
from radixrt.types import MAX_LOGIT_BIAS, MAX_STOP_STRINGS

Name = Annotated[str, Field(max_length=256)]
Label = Annotated[str, Field(max_length=512)]


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None
    # Padding against guessing tokens from packet sizes: none is sent.
    include_obfuscation: bool | None = None


class CacheOptions(Body):
    """How long a prompt shall stay cached.

    Attributes:
        mode: "explicit" without a breakpoint in the prompt: the request shares no prefix with others.
        ttl: least lifetime, e.g. "30m": the prompt is the last to be evicted until so long after its last use.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,6}[smhd]$")] | None = None


class Breakpoint(Body):
    """A mark after which a prompt's reusable part ends: the prompt is kept as with a ttl of 30 minutes."""

    mode: Literal["explicit"] = "explicit"


class RuntimeOptions(Body):
    """The field `radixrt`: what only this server has.

    Attributes:
        details: tell computed and forced tokens, and where and why the prompt missed the cache.
        timeout_s: seconds after which the request ends with status 504.
        label: call site, for reports and learned output lengths.
        on_unsupported: "check" takes a JSON Schema with keywords that no mask can enforce; the finished value is
            checked against them.
        latency_class: "throughput" requests fill what "latency" requests leave.
    """

    details: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    label: Label | None = None
    on_unsupported: Literal["refuse", "check"] = "refuse"
    latency_class: Literal["latency", "throughput"] | None = None


class SamplingBody(Body):
    """How to choose tokens; ranges are those of SamplingParams."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None


class CallBody(SamplingBody):
    """Who asks, how urgent it is, and what shall stay cached.

    Attributes:
        user, safety_identifier, metadata: labels of the client; nothing here reads them.
        service_tier: "priority" and "fast" raise the priority by one, "flex" is the throughput class.
        priority: larger is more urgent (for the server's priority policies).
        prompt_cache_key: requests with different keys share no cached prefix.
        prompt_cache_retention: "24h" keeps the prompt as a ttl of 24 hours does.
        store: nothing is stored, so true is refused.
    """

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    priority: int | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    store: Literal[False] | None = None
    radixrt: RuntimeOptions = RuntimeOptions()


class JsonSchemaFormat(Body):
    """The inner part of a json_schema response format; a schema is enforced whether strict or not."""

    name: Name | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TagContent(Body):
    """What stands between the marks of a tag."""

    type: Literal["json_schema", "regex"]
    json_schema: Any = None
    pattern: str | None = None


class Tag(Body):
    """A constrained part of a text; `schema` is the older way to write a JSON Schema as its content."""

    type: Literal["tag"] = "tag"
    begin: str
    end: str
    content: TagContent | None = None
    schema_: Any = Field(default=None, alias="schema")


Tags = Annotated[list[Tag], Field(min_length=1, max_length=256)]
Triggers = Annotated[list[str], Field(min_length=1, max_length=256)]


class TagFormat(Body):
    """Free text in which a trigger must go on as one of the tags."""

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False


class ResponseFormat(Body):
    """The form of the answer; structural tags in the newer form (format) or the older (structures, triggers)."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: TagFormat | None = None
    structures: Tags | None = None
    triggers: Triggers | None = None


class StructuredOutputs(Body):
    """vLLM's surface of constraints: exactly one of the first six.

    Attributes:
        grammar: Lark, or GBNF where a line defines a rule by "::=".
        structural_tag: JSON text of such a response format.
        disable_any_whitespace: False allows any JSON whitespace; the default is compact JSON.
    """

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None  # no constraint here has a weaker engine to fall back to


class ConstrainedBody(CallBody):
    """The surfaces on which clients write constraints; at most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    # guidance writes its grammar in vLLM's older field too: accepted beside the same in structured_outputs.
    guided_grammar: str | None = None
    guided_decoding_backend: Name | None = None
