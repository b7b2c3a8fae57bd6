"""PrefixReport: the answer to "why did my prefix miss", with text."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.kv.cache import PrefixExplanation
from radixrt.text.tokenizer import Tokenizer

MAX_TEXT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Why a prompt hits the prefix cache as far as it does.

    Attributes:
        num_prompt_tokens, num_cached_tokens: a request with this prompt would compute the difference.
        next_text: text of the first token after the longest match, None when all of it is cached.
        cached_text: what the cache holds in its place (the nearest continuation, up to 32 tokens).
        before_text: the last tokens of the match, so that the place can be found (up to 32 tokens).
        num_pages: whole pages of the match; it ends inside a further page if ends_inside_page.
        num_unbounded_tokens: what would be cached if nothing had been evicted lately.
        evicted_for: label of the request that took the difference ("" if it has none), None when nothing did.
        evicted_reason: "room" or "cleared", with evicted_for.
        evicted_ago_s: seconds since then, with evicted_for.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    next_text: str | None
    cached_text: str
    before_text: str
    num_pages: int
    ends_inside_page: bool
    num_unbounded_tokens: int
    evicted_for: str | None
    evicted_reason: str | None
    evicted_ago_s: float | None

    @classmethod
    def build(
        cls, found: PrefixExplanation, token_ids: tuple[int, ...], *, tokenizer: Tokenizer, now_s: float
    ) -> PrefixReport:
        """Put an explanation into words. Pure."""
        next_id, eviction = found.next_token_id, found.eviction
        start = max(found.num_cached_tokens - MAX_TEXT_TOKENS, 0)
        return cls(
            num_prompt_tokens=found.num_prompt_tokens,
            num_cached_tokens=found.num_cached_tokens,
            next_text=None if next_id is None else tokenizer.token_text(next_id),
            cached_text=tokenizer.decode(found.cached_token_ids[:MAX_TEXT_TOKENS]),
            before_text=tokenizer.decode(token_ids[start : found.num_cached_tokens]),
            num_pages=found.num_pages,
            ends_inside_page=found.partial_page is not None,
            num_unbounded_tokens=found.num_unbounded_tokens,
            evicted_for=None if eviction is None else eviction.label,
            evicted_reason=None if eviction is None else eviction.reason,
            evicted_ago_s=None if eviction is None else now_s - eviction.at_s,
        )

    def __str__(self) -> str:
        """Tell it in two or three lines."""
        lines = [f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens are cached"]
        if self.next_text is not None:
            held = f", the cache holds {self.cached_text!r} there" if self.cached_text else ""
            lines.append(f"after {self.before_text[-40:]!r} comes {self.next_text!r}{held}")
        if self.evicted_reason is not None:
            whom = f" for {self.evicted_for!r}" if self.evicted_for else ""
            why = "the cache was cleared" if self.evicted_reason == "cleared" else f"room was needed{whom}"
            lines.append(
                f"{self.num_unbounded_tokens} would be cached, but {self.evicted_ago_s:.0f} s ago {why}"
            )
        return "\n".join(lines)
