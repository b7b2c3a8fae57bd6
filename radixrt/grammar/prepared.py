"""A constraint read and rewritten, before its vocabulary counts: plain data that one process hands to another."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.matcher import Enforcement

_OF_A_WHOLE: Mapping[str, Enforcement] = MappingProxyType({"": "mask"})


@dataclass(frozen=True, slots=True)
class Marks:
    """The names of a vocabulary's tokens that a tagged text may hold as themselves.

    Attributes:
        controls: of control tokens that do not end a sequence.
        ends: of tokens that do.
    """

    controls: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


NO_MARKS = Marks()


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that can be known of a constraint without a vocabulary; the rest is an engine's build, and cheap.

    Attributes:
        grammar: text in llguidance's own format; "" if an automaton takes its place.
        automaton: of a choice or a small regular expression.
        is_of_user: the grammar's rules are the user's own, so that the engine must not search them for forced runs.
        keywords: see `EnforcementReport`.
        draft: under whose rules finished values are judged, None if the constraint is no schema.
        hints, openers, num_openers, enders: texts that lead to an end; see `Closer` and `Shortcuts`.
        controls: names of the control tokens that the grammar holds.
    """

    grammar: str = ""
    automaton: ByteDFA | None = None
    is_of_user: bool = False
    keywords: Mapping[str, Enforcement] = field(default_factory=lambda: _OF_A_WHOLE)
    draft: int | None = None
    hints: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    num_openers: int = 0
    enders: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON data; `from_json` reads it back. Pure."""
        return {
            "grammar": self.grammar,
            "automaton": None if self.automaton is None else _automaton_as_json(self.automaton),
            "is_of_user": self.is_of_user,
            "keywords": dict(self.keywords),
            "draft": self.draft,
            "hints": self.hints,
            "openers": self.openers,
            "num_openers": self.num_openers,
            "enders": self.enders,
            "controls": self.controls,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prepared:
        """Read what `as_json` gave. Pure."""
        automaton = data["automaton"]
        return cls(
            grammar=data["grammar"],
            automaton=None if automaton is None else _automaton_from_json(automaton),
            is_of_user=data["is_of_user"],
            keywords=MappingProxyType(data["keywords"]),
            draft=data["draft"],
            hints=tuple(data["hints"]),
            openers=tuple(data["openers"]),
            num_openers=data["num_openers"],
            enders=tuple(data["enders"]),
            controls=tuple(data["controls"]),
        )


def _automaton_as_json(automaton: ByteDFA) -> dict[str, Any]:
    return {
        "start": automaton.start,
        # 32 bits hold state * 256 + byte: a constraint of at most 2**20 characters has fewer than 2**23 states.
        "edge_keys": _encoded(automaton.edge_keys.astype("<i4", casting="same_kind")),
        "edge_targets": _encoded(automaton.edge_targets.astype("<i4", casting="same_kind")),
        "accepting": _encoded(automaton.accepting),
    }


def _automaton_from_json(data: Mapping[str, Any]) -> ByteDFA:
    return ByteDFA(
        data["start"],
        _decoded(data["edge_keys"], "<i4").astype(np.int64),
        _decoded(data["edge_targets"], "<i4").astype(np.int64),
        _decoded(data["accepting"], np.bool_),
    )


def _encoded(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _decoded(text: str, dtype: DTypeLike) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
