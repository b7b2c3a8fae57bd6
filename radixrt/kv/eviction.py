"""Which leaf of the radix tree loses its tail first: a key per policy, smallest first; and what it lost.

Keys grow while a node lives, so the tree's queue may hold stale (too small) keys and correct them when they come up;
only a demotion makes one smaller. A counter stands for time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from radixrt.types import Namespace


class EvictionFacts(Protocol):
    """What a policy may know of a node."""

    last_used: int
    created: int
    num_hits: int
    priority: int


EvictionKey = tuple[int, ...]


class Eviction(NamedTuple):
    """A leaf that lost its tail.

    Attributes:
        runs: packed tokens from the root to where the leaf once ended, in pieces: few of them are ever read as one.
        num_tokens, num_kept_tokens: how many of them were still cached, and how many are now.
        num_pages: pages that became free.
    """

    namespace: Namespace
    runs: tuple[bytes, ...]
    num_tokens: int
    num_kept_tokens: int
    num_pages: int


def lru(node: EvictionFacts) -> EvictionKey:
    """Least recently used first."""
    return (node.last_used,)


def lfu(node: EvictionFacts) -> EvictionKey:
    """Least often used first, then least recently."""
    return (node.num_hits, node.last_used)


def fifo(node: EvictionFacts) -> EvictionKey:
    """Oldest first."""
    return (node.created,)


def priority(node: EvictionFacts) -> EvictionKey:
    """Lowest priority first, then least recently used."""
    return (node.priority, node.last_used)


POLICIES: dict[str, Callable[[EvictionFacts], EvictionKey]] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "priority": priority,
}
