"""RadixNode: a run of pages in the radix tree."""

from __future__ import annotations

from typing import Protocol

from radixrt.kv.eviction import EvictionKey
from radixrt.kv.packed import TOKEN_BYTES
from radixrt.types import Namespace


class WantedGap(Protocol):
    """The place of a path among the prefixes that someone waits for.

    Attributes:
        is_open: nothing changed there since it was given.
    """

    is_open: bool

    def num_wanted(self, tokens: bytes, *, num_before: int = 0) -> int:
        """Give how many tokens of the path behind the first num_before are waited for."""


class Wanted(Protocol):
    """Who waits for cached prefixes."""

    def gap(self, namespace: Namespace, tokens: bytes) -> WantedGap:
        """Give where a path stands among the prefixes that someone waits for."""


class RadixNode:
    """A run of pages. Invariants: the first min(page, all) packed tokens are its key in the parent;
    len(pages) == ceil(num_tokens / page_size); only a leaf's last page may be partly filled."""

    __slots__ = (
        "child_keys",
        "children",
        "created",
        "last_used",
        "num_hits",
        "num_links",
        "pages",
        "parent",
        "priority",
        "queued_key",
        "tokens",
        "version",
        "wanted",
    )

    def __init__(self, parent: RadixNode | None, tokens: bytes, pages: list[int], *, created: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.child_keys: list[bytes] = []
        self.version = 0  # grows with every change of its tokens or pages
        self.num_links = 0  # grows with every child that comes or goes
        self.created = created
        self.last_used = created
        self.num_hits = 0
        self.priority = 0
        self.queued_key: EvictionKey | None = None  # under which it stands in the eviction queue
        self.wanted: tuple[WantedGap, bytes, int] | None = None  # pages in demand; holds for these tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_leaf(self) -> bool:
        """Tell whether it is a node of the tree that has no children; no root is a leaf."""
        return not self.children and self.parent is not None


# The leaf that was cut last, its tokens since, and the namespace and the runs of its path before the first of the cuts that
# followed one another, and how many tokens of that are left: such cuts share one path.
LastCut = tuple[RadixNode | None, bytes, Namespace, tuple[bytes, ...], int]
