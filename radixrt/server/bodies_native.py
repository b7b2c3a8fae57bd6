"""The bodies of the native routes: /generate, /explain, /scopes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from radixrt.constraints import GrammarKind, GrammarSpec, OnUnsupported, Whitespace
from radixrt.server.bodies import CallBody, Label, Name
from radixrt.server.bodies_chat import Message
from radixrt.server.native import Segment
from radixrt.server.reading import Body
from radixrt.server.scopes import MAX_SCOPES_PER_TENANT

PromptIds = Annotated[list[int], Field(max_length=1 << 20)]
TtlS = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ScopeNames = Annotated[list[Name], Field(max_length=MAX_SCOPES_PER_TENANT)]
Segments = Annotated[list[Segment], Field(max_length=4096)]


class GrammarBody(Body):
    """A constraint, field by field as GrammarSpec has it."""

    kind: GrammarKind
    text: str
    whitespace: Whitespace = "compact"
    on_unsupported: OnUnsupported = "refuse"

    def spec(self) -> GrammarSpec:
        """Give the GrammarSpec."""
        return GrammarSpec(self.kind, self.text, self.whitespace, self.on_unsupported)


class GenerateBody(CallBody):
    """A request in the engine's own terms; exactly one of prompt, segments and prompt_ids.

    Attributes:
        is_start: of segments: nothing is before them.
        logprob_start: first prompt position whose logprob is wanted, with prompt_logprobs.
        scope: an open scope of /scopes that keeps this request's prefix.
        scope_ttl_s: with it `scope` may be any name: a scope that is not open is opened under it, to end so long after
            its last use, or after the server's max_retention_s if that is less. A name that was closed keeps nothing more.
        closed_scopes: scopes to close first, as /scopes/close does.
        is_resumable: a stream that can be read on from any position under its id, also after a broken connection.
    """

    prompt: str | None = None
    segments: Segments | None = None
    prompt_ids: PromptIds | None = None
    is_start: bool = True
    max_tokens: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    shown_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0
    grammar: GrammarBody | None = None
    scope: Name | None = None
    scope_ttl_s: TtlS | None = None
    closed_scopes: ScopeNames | None = None
    is_resumable: bool = False


class ExplainBody(Body):
    """A prompt to explain; exactly one of prompt, segments, prompt_ids and messages."""

    model: Name | None = None
    prompt: str | None = None
    segments: Segments | None = None
    prompt_ids: PromptIds | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    is_start: bool = True
    prompt_cache_key: Label | None = None


class ScopeBody(Body):
    """How long a scope lives after its last use, in seconds."""

    ttl_s: TtlS = 600.0


class CloseScopesBody(Body):
    """Scopes of one's own to close at once; those that are not open are passed over."""

    scopes: ScopeNames
