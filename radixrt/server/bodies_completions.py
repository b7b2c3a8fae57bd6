"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixrt.server.bodies import ConstrainedBody


class CompletionBody(ConstrainedBody):
    """A completion request: one prompt or several, as text or token ids.

    Attributes:
        echo: the answer begins with the prompt, and logprobs cover it.
        max_tokens: 0 with echo gives the prompt's own logprobs and nothing new.
        logprobs: None, or how many alternatives per token, besides the token itself.
        add_special_tokens: whether a text prompt begins with BOS where the model wants one.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    add_special_tokens: Annotated[bool | None, Field()] = None
