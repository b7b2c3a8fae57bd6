"""The tokens of a vocabulary as a trie of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT = 0
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """All tokens with text, by their bytes. Node 0 is the root; children of a node are contiguous.

    Attributes:
        node_byte: [N] int64, the byte on the edge into a node.
        child_start: [N + 1] int64; the children of n are nodes [child_start[n], child_start[n + 1]).
        token_start: [N + 1] int64; the tokens that end at n are token_ids[token_start[n] : token_start[n + 1]].
        token_ids: [num tokens] int64.
        parent: [N] int32, -1 for the root.
        child_keys: [N - 1] int64, ascending: parent * 256 + byte of every node but the root.
        level_start: first node of each level, and N: nodes are numbered level by level.
    """

    node_byte: NDArray[np.int64]
    child_start: NDArray[np.int64]
    token_start: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    parent: NDArray[np.int32]
    child_keys: NDArray[np.int64]
    level_start: tuple[int, ...]

    @classmethod
    def build(cls, vocab_bytes: Sequence[bytes]) -> TokenTrie:
        """Build level by level. Cost: linear in the bytes of all tokens, in numpy."""
        lengths = np.array([len(token) for token in vocab_bytes], dtype=np.int64)
        flat = np.frombuffer(b"".join(vocab_bytes), dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
        alive = np.flatnonzero(lengths > 0)  # tokens that reach beyond this level
        node = np.zeros(len(lengths), dtype=np.int64)  # deepest node of each token so far
        bytes_of, parents = [np.zeros(1, dtype=np.int64)], [np.full(1, -1, dtype=np.int64)]
        num_nodes, depth = 1, 0
        level_start = [0, 1]
        while alive.size:
            keys = node[alive] * 256 + flat[starts[alive] + depth]
            unique, inverse = np.unique(keys, return_inverse=True)
            bytes_of.append(unique % 256)
            parents.append(unique // 256)
            node[alive] = num_nodes + inverse
            num_nodes += len(unique)
            level_start.append(num_nodes)
            depth += 1
            alive = alive[lengths[alive] > depth]
        # Nodes are numbered by level, and within it by (parent, byte): so each node's children are contiguous.
        parent = np.concatenate(parents)
        child_start = np.searchsorted(parent, np.arange(num_nodes + 1)).astype(np.int64)
        tokens = np.flatnonzero(lengths > 0)
        order = np.argsort(node[tokens], kind="stable")
        token_start = np.searchsorted(node[tokens][order], np.arange(num_nodes + 1)).astype(np.int64)
        node_byte = np.concatenate(bytes_of)
        return cls(
            node_byte,
            child_start,
            token_start,
            tokens[order].astype(np.int64),
            parent.astype(np.int32),
            parent[1:] * 256 + node_byte[1:],
            tuple(level_start),
        )

    def children_of(self, nodes: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the child of each node by each byte, NO_NODE where there is none. Pure."""
        if self.num_nodes == 1:
            return np.full(nodes.shape, NO_NODE, dtype=np.int64)
        keys = nodes * 256 + values
        positions = np.minimum(self.child_keys.searchsorted(keys), self.num_nodes - 2)
        return np.where(self.child_keys[positions] == keys, positions + 1, NO_NODE)

    def find(self, data: bytes) -> int | None:
        """Give the node of a byte string, None when no token begins with it."""
        node = ROOT
        for byte in data:
            start, stop = int(self.child_start[node]), int(self.child_start[node + 1])
            position = start + int(np.searchsorted(self.node_byte[start:stop], byte))
            if position == stop or self.node_byte[position] != byte:
                return None
            node = position
        return node

    def has_longer(self, data: bytes) -> bool:
        """Tell whether some token begins with `data` and goes on."""
        node = self.find(data)
        return node is not None and bool(self.child_start[node + 1] > self.child_start[node])

    @property
    def num_nodes(self) -> int:
        return len(self.node_byte)
