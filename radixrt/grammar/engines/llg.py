"""The llguidance engine: JSON Schema, Lark and large regular expressions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from types import MappingProxyType

import llguidance
import numpy as np

from radixrt.constraints import GrammarSpec
from radixrt.errors import GrammarDeadEnd, GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.closing import Closer, Shortcuts
from radixrt.grammar.explain import explain
from radixrt.grammar.forcing import ByteFollower, byte_tokenizer
from radixrt.grammar.matcher import EnforcementReport, MaskExplanation, MaskRow, check_row
from radixrt.grammar.vocabulary import GrammarVocabulary

ENGINE = "llguidance"
# Words in the engine's complaints about its limits.
_LIMIT_WORDS = ("max is", "fuel", "too large", "too complex", "limit")
NO_CONTROL: Mapping[str, int] = MappingProxyType({})
USER_STEP_ITEMS = 20_000  # of a user's grammar, in one mask
MAX_FIRST_CLOSINGS = 64  # by max_tokens
_BYTES_PER_CHARACTER = 64  # of grammar text: the engine does not tell what it holds


class LLGrammar:
    """A constraint compiled by llguidance. Immutable: matchers are copies of a pristine one."""

    def __init__(
        self,
        spec: GrammarSpec,
        vocabulary: GrammarVocabulary,
        *,
        grammar: str,
        report: EnforcementReport,
        judge: Callable[[str], bool | None] | None = None,
        hints: Sequence[str] = (),
        shortcuts: Callable[[], Shortcuts] = Shortcuts,
        control_ids: Mapping[str, int] = NO_CONTROL,
        follows_bytes: bool = False,
    ) -> None:
        """Compile.

        Args:
            grammar: text in llguidance's own format.
            judge: decides about finished texts; where it gives None, or is None, the grammar itself does.
            hints: texts that may help to end a string (see `Closer`).
            shortcuts: gives other ways to the end, when first needed.
            control_ids: control tokens that the grammar names, by their names.
            follows_bytes: look for forced runs here: the grammar switches the engine's own search off.
        Raises:
            UnsupportedGrammar: the engine refuses the grammar, or it allows no token at its start.
            GrammarTooCostly: it is over a limit of the engine.
        """
        self.spec = spec
        self.report = report
        self.vocabulary = vocabulary
        self._judge = judge
        self._hints = hints
        self._shortcuts = shortcuts
        self.control_ids = control_ids
        self._first_closings: dict[tuple[int, bool], tuple[list[int] | None]] = {}
        self._num_bytes = _BYTES_PER_CHARACTER * len(grammar)
        self._byte_cursor = (
            partial(_matcher, byte_tokenizer(), grammar, is_of_user=True) if follows_bytes else None
        )
        self._pristine = _matcher(vocabulary.llguidance_tokenizer, grammar, is_of_user=follows_bytes)
        self._raise_if_refused(self._pristine)
        matcher = self._pristine.deep_copy()
        mask = matcher.compute_bitmask()
        self._raise_if_refused(matcher)
        if not any(mask):
            raise self._empty()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def start(self) -> LLMatcher:
        follower = None if self._byte_cursor is None else ByteFollower(self._byte_cursor)
        return LLMatcher(self, self._pristine.deep_copy(), follower=follower)

    @cached_property
    def mask_bits(self) -> MaskRow:
        """Give the mask of all tokens that the constraint may ever allow."""
        bits = self.vocabulary.text_bits.copy()
        for token_id in self.control_ids.values():
            bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return bits

    def may_take(self, token_id: int) -> bool:
        """Tell whether the token has bytes or is a control token of this grammar."""
        return self.vocabulary.is_text(token_id) or token_id in self.control_ids.values()

    @cached_property
    def closer(self) -> Closer:
        hints = tuple(tuple(self.vocabulary.encode(hint)) for hint in self._hints)
        flags = self.vocabulary.text_flags.copy()
        flags[list(self.control_ids.values())] = 1
        return Closer(self.vocabulary.closing_ranks, flags, hints, self._shortcuts())

    def first_closing(self, max_tokens: int, *, is_quick: bool) -> list[int] | None:
        """Give `closer.run` from the beginning: many sequences start there."""
        key = (max_tokens, is_quick)
        known = self._first_closings.get(key)
        if known is None:
            known = (self.closer.run(self._pristine, max_tokens, is_quick=is_quick),)
            if len(self._first_closings) >= MAX_FIRST_CLOSINGS:
                self._first_closings.clear()
            self._first_closings[key] = known
        [found] = known
        return None if found is None else list(found)

    def check(self, text: str) -> bool:
        verdict = None if self._judge is None else self._judge(text)
        if verdict is not None:
            return verdict
        if self.report.checked:  # the masks alone do not tell
            raise GrammarDeadEnd("the value could not be checked within the limit of time")
        ids = self.vocabulary.encode_marked(text, self.control_ids)
        matcher = self._pristine.deep_copy()
        is_whole = b"".join(map(self.vocabulary.shown, ids)) == text.encode()
        return is_whole and matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    def _raise_if_refused(self, matcher: llguidance.LLMatcher) -> None:
        if not matcher.is_error():
            return
        reason = " ".join(matcher.get_error().split())[:300]
        if "NoExtension" in reason:
            raise self._empty()
        if any(word in reason.lower() for word in _LIMIT_WORDS):
            raise GrammarTooCostly(
                f"the constraint is over a limit of the grammar engine: {reason}", parameter="grammar"
            )
        raise UnsupportedGrammar(
            f"the constraint is not supported: {reason}", parameter="grammar", value=self.spec.text[:200]
        )

    def _empty(self) -> UnsupportedGrammar:
        return UnsupportedGrammar(
            "the constraint accepts no text at all", parameter="grammar", value=self.spec.text[:200]
        )


def _matcher(
    tokenizer: llguidance.LLTokenizer, grammar: str, *, is_of_user: bool = False
) -> llguidance.LLMatcher:
    """Make the engine's cursor, with limits on what one mask may cost.

    Objects of thousands of optional properties need many items; a user's ambiguous grammar would take a second for
    one mask with as many.
    """
    if is_of_user:
        limits = llguidance.LLParserLimits(step_max_items=USER_STEP_ITEMS, verbose_errors=False)
    else:
        limits = llguidance.LLParserLimits(
            max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
        )
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


class LLMatcher:
    """A cursor over llguidance's matcher; see `GrammarMatcher`.

    Where the engine finds that the grammar forces a run of tokens, the mask holds the run's canonical first token
    only, although other tokens would spell the same bytes; `accept` follows the mask. In a user's grammar a follower
    finds the runs instead, and masks hold all spellings.
    """

    __slots__ = ("_cursor", "_data", "_follower", "_forced", "_grammar", "_num_accepted", "_vocabulary")

    def __init__(
        self,
        grammar: LLGrammar,
        cursor: llguidance.LLMatcher,
        *,
        num_accepted: int = 0,
        follower: ByteFollower | None = None,
        data: tuple[bytes, ...] = (),
    ) -> None:
        self._grammar = grammar
        self._cursor = cursor
        self._vocabulary = grammar.vocabulary
        self._num_accepted = num_accepted
        self._forced: list[int] | None = None  # of the current state, when known
        self._follower = follower
        self._data = list(data)  # the tokens accepted, for the follower

    @property
    def is_accepting(self) -> bool:
        return bool(self._cursor.is_accepting())

    @property
    def is_terminated(self) -> bool:
        return bool(self._cursor.is_stopped()) and self.is_accepting

    def fill_mask(self, row: MaskRow) -> None:
        # Every microsecond here is one of each token. `row.ctypes` would take one, `&=` two thirds of one.
        vocabulary, cursor = self._vocabulary, self._cursor
        check_row(row, vocabulary.vocab_size)
        if cursor.is_stopped():
            self._raise_error()
            row[:] = 0
            return
        num_words = vocabulary.num_words
        cursor.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(row.data)), 4 * num_words)
        if cursor.is_error():
            self._raise_error()
        if num_words < len(row):
            row[num_words:] = 0
        if cursor.is_accepting():  # only then the engine sets the bits of tokens that end a sequence
            row &= self._grammar.mask_bits

    def accept(self, token_id: int) -> bool:
        if not self._grammar.may_take(token_id) or self._cursor.is_stopped():
            return False
        if (forced := self._current_forced()) and forced[0] != token_id:
            return False
        if self._cursor.try_consume_tokens([token_id]) != 1:
            self._raise_error()
            return False
        self._note_taken([token_id])
        return True

    def accept_run(self, token_ids: Sequence[int]) -> int:
        # In one call, and without a look at what is forced before every token, which costs more than to take it.
        if self._cursor.is_stopped():
            return 0
        run = list(takewhile(self._grammar.may_take, token_ids))
        num_taken = int(self._cursor.try_consume_tokens(run))
        if num_taken < len(run):
            self._raise_error()
        self._note_taken(run[:num_taken])
        return num_taken

    def _note_taken(self, token_ids: Sequence[int]) -> None:
        self._forced = None
        self._num_accepted += len(token_ids)
        if self._follower is not None:
            self._data += [self._vocabulary.vocab_bytes[token_id] for token_id in token_ids]

    def validate(self, token_ids: Sequence[int]) -> int:
        num_valid = 0
        for token_id in token_ids:
            if not self.accept(token_id):
                break
            num_valid += 1
        self.rollback(num_valid)
        return num_valid

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_accepted:
            raise ValueError(f"num_tokens must be in [0, {self._num_accepted}], got {num_tokens}")
        if num_tokens:
            self._cursor.rollback(num_tokens)
            self._raise_error()
            self._num_accepted -= num_tokens
            self._forced = None
            if self._follower is not None:
                del self._data[self._num_accepted :]
                self._follower.cut(sum(map(len, self._data)))

    def fork(self) -> LLMatcher:
        return LLMatcher(
            self._grammar,
            self._cursor.deep_copy(),
            num_accepted=self._num_accepted,
            follower=None if self._follower is None else self._follower.fork(),
            data=tuple(self._data),
        )

    def forced_tokens(self) -> list[int]:
        if self._follower is None or self._cursor.is_stopped():
            return list(self._current_forced())
        run, is_end = self._follower.forced(b"".join(self._data))
        return self._vocabulary.canonical_run(run, is_end=is_end) if run else []

    def _current_forced(self) -> list[int]:
        if self._forced is None:
            is_over = self._cursor.is_stopped()
            self._forced = [] if is_over else self._cursor.compute_ff_tokens()
        return self._forced

    def _raise_error(self) -> None:
        if self._cursor.is_error():
            raise GrammarDeadEnd(f"the grammar engine gave up: {self._cursor.get_error().splitlines()[0]}")

    def explain_mask(self, token_id: int) -> MaskExplanation:
        return explain(self, self._grammar.vocabulary, token_id)

    def closing_run(
        self, max_tokens: int, *, is_quick: bool = False, known: Sequence[int] = ()
    ) -> list[int] | None:
        if not self._num_accepted:
            return self._grammar.first_closing(max_tokens, is_quick=is_quick)
        return self._grammar.closer.run(self._cursor, max_tokens, is_quick=is_quick, known=known)

    def rests_of(self, run: Sequence[int], token_id: int) -> Iterator[list[int]]:
        return self._vocabulary.rests_of(run, token_id)
