"""Deterministic automata over bytes, pruned so that every state can still reach an accepting one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import outlines_core
from numpy.typing import NDArray

from radixrt.errors import UnsupportedGrammar, first_line
from radixrt.grammar.trie import ROOT, TokenTrie

DEAD = -1
# Ends the text while compiling. outlines-core stops inside characters after an accepting state, so no state but
# the one after the sentinel may accept. The sentinel is a code point that is no character: a pattern that could
# match it as text (".") does not.
_SENTINEL = "\U0010ffff"
_END_TOKEN = 256


@dataclass(frozen=True, slots=True)
class ByteDFA:
    """An automaton with sparse edges.

    Attributes:
        start: the first state; states are [0, S).
        edge_keys: [E] int64, ascending: state * 256 + byte.
        edge_targets: [E] int64.
        accepting: [S] bool.
    Invariant: from every state but a dead start an accepting state can be reached.
    """

    start: int
    edge_keys: NDArray[np.int64]
    edge_targets: NDArray[np.int64]
    accepting: NDArray[np.bool_]

    @classmethod
    def from_strings(cls, strings: Sequence[str]) -> ByteDFA:
        """Build the automaton that accepts exactly these strings. Cost: linear in their bytes."""
        trie = TokenTrie.build([text.encode() for text in strings])
        parents = np.repeat(np.arange(trie.num_nodes), np.diff(trie.child_start))
        children = np.arange(1, trie.num_nodes)
        return cls(ROOT, parents * 256 + trie.node_byte[1:], children, np.diff(trie.token_start) > 0)

    @classmethod
    def from_regex(cls, pattern: str) -> ByteDFA:
        """Compile a regular expression (Rust syntax, no anchors) that must match the whole text.

        The caller bounds the size first: determinization can take exponential space.

        Raises:
            UnsupportedGrammar: outlines-core refuses the expression.
        """
        vocabulary = outlines_core.Vocabulary(_END_TOKEN, {bytes([byte]): [byte] for byte in range(256)})
        try:
            index = outlines_core.Index(f"(?:{pattern}){_SENTINEL}", vocabulary)
        except ValueError as error:
            raise UnsupportedGrammar(
                f"the regular expression is not supported: {first_line(error)}",
                parameter="grammar",
                value=pattern[:200],
            ) from error
        transitions: dict[int, dict[int, int]] = index.get_transitions()
        first = index.get_initial_state()
        number = {first: 0}
        for state, edges in transitions.items():
            for target in (state, *edges.values()):
                number.setdefault(target, len(number))
        final = set(index.get_final_states())
        accepting = np.zeros(len(number), dtype=np.bool_)
        keyed: dict[int, int] = {}
        for state, edges in transitions.items():
            accepting[number[state]] = _follow(transitions, state, _SENTINEL.encode()) in final
            for byte, target in edges.items():
                if byte != _END_TOKEN:
                    keyed[number[state] * 256 + byte] = number[target]
        keys = np.array(sorted(keyed), dtype=np.int64)
        targets = np.array([keyed[key] for key in keys.tolist()], dtype=np.int64)
        return cls(0, keys, targets, accepting)._pruned()

    @property
    def is_empty(self) -> bool:
        """Tell whether it accepts no text at all."""
        return not self.accepting[self.start] and self.out_edges(self.start)[0].size == 0

    @property
    def num_bytes(self) -> int:
        return int(self.edge_keys.nbytes + self.edge_targets.nbytes + self.accepting.nbytes)

    def step(self, states: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the next states, DEAD where there is no edge. Pure."""
        if not self.edge_keys.size:
            return np.full(states.shape, DEAD, dtype=np.int64)
        keys = states * 256 + values
        positions = np.minimum(np.searchsorted(self.edge_keys, keys), self.edge_keys.size - 1)
        return np.where(self.edge_keys[positions] == keys, self.edge_targets[positions], DEAD)

    def edge_ranges(self, states: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the ranges [first, last) of the edges that leave some states. Pure."""
        return self.edge_keys.searchsorted(states * 256), self.edge_keys.searchsorted(states * 256 + 256)

    def out_edges(self, state: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the bytes and targets of a state's edges. Pure."""
        first, last = np.searchsorted(self.edge_keys, [state * 256, state * 256 + 256])
        return self.edge_keys[first:last] % 256, self.edge_targets[first:last]

    def table(self) -> NDArray[np.int32]:
        """Give the next states as a table: [(S + 1) * 256], of state * 256 + byte. State S is dead. Pure."""
        num_states = len(self.accepting)
        table = np.full((num_states + 1) * 256, num_states, dtype=np.int32)
        table[self.edge_keys] = self.edge_targets
        return table

    def shortest(self) -> bytes | None:
        """Give a shortest text that is accepted, None if there is none. Cost: linear in the edges."""
        texts = {self.start: b""}
        frontier = [self.start]
        while frontier:
            reached = []
            for state in frontier:
                if self.accepting[state]:
                    return texts[state]
                values, targets = self.out_edges(state)
                for value, target in zip(values.tolist(), targets.tolist(), strict=True):
                    if target not in texts:
                        texts[target] = texts[state] + bytes([value])
                        reached.append(target)
            frontier = reached
        return None

    def _pruned(self) -> ByteDFA:
        """Drop the edges to states from which no accepting state can be reached."""
        sources = self.edge_keys // 256
        is_live = self.accepting.copy()
        while True:
            found = sources[is_live[self.edge_targets]]
            if is_live[found].all():
                break
            is_live[found] = True
        keep = is_live[self.edge_targets]
        return ByteDFA(self.start, self.edge_keys[keep], self.edge_targets[keep], self.accepting)


def _follow(transitions: dict[int, dict[int, int]], state: int, data: bytes) -> int | None:
    """Give the state after some bytes, None if there is no such way. Pure."""
    current: int | None = state
    for byte in data:
        if current is None:
            break
        current = transitions.get(current, {}).get(byte)
    return current
