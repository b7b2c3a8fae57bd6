"""Constraints on generated text: compile a `GrammarSpec`, then ask its matcher for masks, token by token."""

from radixrt.grammar.cache import GrammarCache
from radixrt.grammar.compile import compile
from radixrt.grammar.matcher import CompiledGrammar, EnforcementReport, GrammarMatcher, MaskExplanation

__all__ = [
    "CompiledGrammar",
    "EnforcementReport",
    "GrammarCache",
    "GrammarMatcher",
    "MaskExplanation",
    "compile",
]
