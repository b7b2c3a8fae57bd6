"""The automaton engine: choices and small regular expressions, with one cached mask per state."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.constraints import GrammarSpec
from radixrt.errors import UnsupportedGrammar
from radixrt.grammar.engines.byte_dfa import DEAD, ByteDFA
from radixrt.grammar.explain import explain
from radixrt.grammar.matcher import EnforcementReport, MaskExplanation, MaskRow, check_row
from radixrt.grammar.trie import NO_NODE, ROOT, TokenTrie
from radixrt.grammar.vocabulary import MAX_FORCED_BYTES, GrammarVocabulary, pack_mask

ENGINE = "byte automaton"
MAX_CACHED_MASK_BYTES = 16 << 20  # per constraint
MAX_SEARCH_EDGES = 20_000_000  # token edges that one search for an end may look at: about a second
MAX_QUICK_EDGES = 1_000_000
# Nodes of one level of the trie; where an automaton reaches more, all nodes are looked up at once.
MAX_SPARSE_NODES = 2048
_MAX_TABLE_STATES = 4096
_SEARCH_EDGES = 200_000  # looked up together, about
_SEARCH_CHUNK = 64  # states whose tokens are looked up together


class DFAGrammar:
    """A constraint as a byte automaton. Immutable but for the cache of masks, which a lock guards."""

    def __init__(self, spec: GrammarSpec, vocabulary: GrammarVocabulary, *, dfa: ByteDFA) -> None:
        """Take an automaton.

        Raises:
            UnsupportedGrammar: it accepts no text at all.
        """
        if dfa.is_empty:
            raise UnsupportedGrammar(
                "the constraint accepts no text at all", parameter="grammar", value=spec.text[:200]
            )
        self.spec = spec
        self.report = EnforcementReport(engine=ENGINE)
        self.vocabulary = vocabulary
        self.dfa = dfa
        self._masks: dict[int, MaskRow] = {}
        self._table: NDArray[np.int32] | None = None
        self._lock = threading.Lock()
        assert vocabulary.trie is not None  # built now, not in the first mask's time

    @property
    def num_bytes(self) -> int:
        mask_bytes = len(self._masks) * 4 * ((self.vocabulary.vocab_size + 31) // 32)
        table_bytes = 0 if self._table is None else self._table.nbytes
        return self.dfa.num_bytes + mask_bytes + table_bytes

    def start(self) -> DFAMatcher:
        return DFAMatcher(self, _Position(self.dfa.start, None, 0))

    def check(self, text: str) -> bool:
        state = self.walk(self.dfa.start, text.encode("utf-8", "surrogatepass"))
        return state != DEAD and bool(self.dfa.accepting[state])

    def walk(self, state: int, data: bytes) -> int:
        """Give the state after some bytes, DEAD if they are not allowed."""
        keys, targets = self.dfa.edge_keys, self.dfa.edge_targets
        for byte in data:
            key = state * 256 + byte
            position = int(keys.searchsorted(key))
            if position == len(keys) or keys[position] != key:
                return DEAD
            state = int(targets[position])
        return state

    def mask(self, state: int) -> MaskRow:
        """Give the mask of a state; computed once, not to be written to."""
        row = self._masks.get(state)
        if row is None:
            bits = np.zeros((self.vocabulary.vocab_size + 31) // 32 * 32, dtype=np.uint8)
            bits[self._allowed(state)] = 1
            row = pack_mask(bits)
            with self._lock:
                while self._masks and (len(self._masks) + 1) * row.nbytes > MAX_CACHED_MASK_BYTES:
                    del self._masks[next(iter(self._masks))]
                self._masks[state] = row
        return row

    def _allowed(self, state: int) -> NDArray[np.int64]:
        """Give the tokens allowed in a state. Cost: the trie's edges that are reached, or twice all of its nodes."""
        is_small = len(self.dfa.accepting) <= _MAX_TABLE_STATES
        found = _token_edges(
            self.dfa,
            self.vocabulary.trie,
            np.array([state]),
            max_nodes=MAX_SPARSE_NODES if is_small else None,
        )
        if found is not None:
            return found[0]
        if self._table is None:
            self._table = self.dfa.table()
        return _all_token_edges(self._table, self.vocabulary.trie, state)

    def forced_bytes(self, state: int) -> tuple[bytes, bool]:
        """Give the bytes with no alternative from a state on, and whether the text ends after them."""
        data = bytearray()
        while len(data) < MAX_FORCED_BYTES and not self.dfa.accepting[state]:
            values, targets = self.dfa.out_edges(state)
            if len(values) != 1:
                return bytes(data), False
            data.append(int(values[0]))
            state = int(targets[0])
        return bytes(data), bool(self.dfa.accepting[state]) and not self.dfa.out_edges(state)[0].size

    def closing_run(self, state: int, max_tokens: int, *, is_quick: bool = False) -> list[int] | None:
        """Give a shortest run of tokens to an accepting state, by breadth-first search."""
        if self.dfa.accepting[state]:
            return []
        num_states = len(self.dfa.accepting)
        came_from, by_token = np.full((2, num_states), DEAD)  # of each state that was reached
        came_from[state] = state
        frontier, num_edges, num_together = np.array([state]), 0, _SEARCH_CHUNK
        for _ in range(max_tokens):
            reached: list[NDArray[np.int64]] = []
            first = 0
            while first < len(frontier):
                starts = frontier[first : first + num_together]
                first += num_together
                edges = _token_edges(self.dfa, self.vocabulary.trie, starts)
                assert edges is not None
                tokens, targets, origins = edges
                new, index = np.unique(targets, return_index=True)
                is_first = came_from[new] == DEAD
                new, index = new[is_first], index[is_first]
                came_from[new], by_token[new] = origins[index], tokens[index]
                reached.append(new)
                num_edges += len(tokens)
                if num_edges > (MAX_QUICK_EDGES if is_quick else MAX_SEARCH_EDGES):
                    return None
                # As many states at once as memory allows: those of a list of choices have few edges each.
                is_light = len(tokens) < _SEARCH_EDGES
                num_together = num_together * 2 if is_light else max(num_together // 2, _SEARCH_CHUNK)
            frontier = np.concatenate(reached) if reached else frontier[:0]
            if (ends := frontier[self.dfa.accepting[frontier]]).size:
                return _way_back(came_from, by_token, int(ends[0]), start=state)
        return None


def _way_back(
    came_from: NDArray[np.int64], by_token: NDArray[np.int64], end: int, *, start: int
) -> list[int]:
    """Give the tokens on the way that a search found from start to end. Pure."""
    run = []
    while end != start:
        run.append(int(by_token[end]))
        end = int(came_from[end])
    return run[::-1]


def _token_edges(
    dfa: ByteDFA, trie: TokenTrie, starts: NDArray[np.int64], *, max_nodes: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
    """Give the tokens allowed in some states: token ids, the states they lead to, and the states they leave.

    Walks trie and automaton together, level by level. Cost: on each level the edges of the trie or those of the
    automaton, whichever are fewer.

    Args:
        max_nodes: give up, with None, where more nodes of one level are reached.
    """
    nodes, states, origins = np.full(len(starts), ROOT), starts, starts
    found = []
    while nodes.size:
        if max_nodes is not None and nodes.size > max_nodes:
            return None
        firsts, lasts = trie.child_start[nodes], trie.child_start[nodes + 1]
        edge_firsts, edge_lasts = dfa.edge_ranges(states)
        if (edge_lasts - edge_firsts).sum() < (lasts - firsts).sum():  # few ways on: ask the trie for each
            edges, index = _ranges(edge_firsts, edge_lasts)
            targets = dfa.edge_targets[edges]
            children = trie.children_of(nodes[index], dfa.edge_keys[edges] % 256)
            is_alive = children != NO_NODE
        else:
            children, index = _ranges(firsts, lasts)
            targets = dfa.step(states[index], trie.node_byte[children])
            is_alive = targets != DEAD
        nodes, states, origins = children[is_alive], targets[is_alive], origins[index][is_alive]
        positions, index = _ranges(trie.token_start[nodes], trie.token_start[nodes + 1])
        found.append((trie.token_ids[positions], states[index], origins[index]))
    tokens, targets, origins = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return tokens, targets, origins


def _all_token_edges(table: NDArray[np.int32], trie: TokenTrie, state: int) -> NDArray[np.int64]:
    """Give the tokens allowed in a state by looking up every node of the trie: 1 ms for 100,000 of them."""
    dead = len(table) // 256 - 1
    states = np.empty(trie.num_nodes, dtype=np.int32)
    states[ROOT] = state
    for start, stop in itertools.pairwise(trie.level_start[1:]):
        keys = states[trie.parent[start:stop]] * 256 + trie.node_byte[start:stop]
        states[start:stop] = table[keys]
    is_alive = np.repeat(states != dead, np.diff(trie.token_start))
    allowed: NDArray[np.int64] = trie.token_ids[is_alive]
    return allowed


def _ranges(
    starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate the ranges [start, stop); give the numbers and, for each, the index of its range. Pure."""
    lengths = stops - starts
    index = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return np.arange(len(index)) - before[index] + starts[index], index


class _Position:
    """A state and the way back: matchers share their past, so a fork costs nothing."""

    __slots__ = ("num_accepted", "previous", "state")

    def __init__(self, state: int, previous: _Position | None, num_accepted: int) -> None:
        self.state = state
        self.previous = previous
        self.num_accepted = num_accepted


class DFAMatcher:
    """A cursor over a `DFAGrammar`; see `GrammarMatcher`."""

    __slots__ = ("_grammar", "_position")

    def __init__(self, grammar: DFAGrammar, position: _Position) -> None:
        self._grammar = grammar
        self._position = position

    @property
    def is_accepting(self) -> bool:
        return bool(self._grammar.dfa.accepting[self._position.state])

    @property
    def is_terminated(self) -> bool:
        return self.is_accepting and not self._grammar.dfa.out_edges(self._position.state)[0].size

    def fill_mask(self, row: MaskRow) -> None:
        check_row(row, self._grammar.vocabulary.vocab_size)
        row[:] = self._grammar.mask(self._position.state)

    def accept(self, token_id: int) -> bool:
        if not self._grammar.vocabulary.is_text(token_id):
            return False
        state = self._grammar.walk(self._position.state, self._grammar.vocabulary.vocab_bytes[token_id])
        if state == DEAD:
            return False
        self._position = _Position(state, self._position, self._position.num_accepted + 1)
        return True

    def accept_run(self, token_ids: Sequence[int]) -> int:
        for num_taken, token_id in enumerate(token_ids):
            if not self.accept(token_id):
                return num_taken
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return self.fork().accept_run(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._position.num_accepted:
            raise ValueError(f"num_tokens must be in [0, {self._position.num_accepted}], got {num_tokens}")
        for _ in range(num_tokens):
            assert self._position.previous is not None
            self._position = self._position.previous

    def fork(self) -> DFAMatcher:
        return DFAMatcher(self._grammar, self._position)

    def forced_tokens(self) -> list[int]:
        data, is_end = self._grammar.forced_bytes(self._position.state)
        return self._grammar.vocabulary.canonical_run(data, is_end=is_end) if data else []

    def explain_mask(self, token_id: int) -> MaskExplanation:
        return explain(self, self._grammar.vocabulary, token_id)

    def closing_run(
        self, max_tokens: int, *, is_quick: bool = False, known: Sequence[int] = ()
    ) -> list[int] | None:
        return self._grammar.closing_run(self._position.state, max_tokens, is_quick=is_quick)

    def rests_of(self, run: Sequence[int], token_id: int) -> Iterable[list[int]]:
        return ()  # a search costs less
