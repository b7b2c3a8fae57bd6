"""From a constraint to masks: which engine takes it."""

from __future__ import annotations

import re

import llguidance

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, InvalidRequest, first_line
from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.engines.dfa import DFAGrammar
from radixrt.grammar.engines.llg import ENGINE, LLGrammar
from radixrt.grammar.matcher import CompiledGrammar, EnforcementReport
from radixrt.grammar.regex_cost import check_regex, max_states, whole_match
from radixrt.grammar.schema.compile import compile_schema
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import GrammarKind, GrammarSpec, check_choices

DEFAULT_LIMITS = GrammarConfig()

# Above these bounds a regular expression goes to llguidance, which builds its automaton as it goes. Classes of all
# of Unicode take hundreds of byte states a character, so they count against the lower one.
MAX_DFA_STATES = 2048 + 512
MAX_UNICODE_DFA_STATES = 64
_UNICODE_CLASS = re.compile(r"\\[wWDSpP]")


def compile(
    spec: GrammarSpec,
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    config: GrammarConfig = DEFAULT_LIMITS,
) -> CompiledGrammar:
    """Compile a constraint for one vocabulary, in this process. `GrammarCache` shares the work between requests and
    tries large constraints out in another process first.

    Args:
        vocab_size: columns of the masks; default: tokenizer.vocab_size.
    Raises:
        InvalidRequest: the text is malformed.
        UnsupportedGrammar: it cannot be enforced exactly.
        GrammarTooCostly: it is over a limit of `config`.
    Cost: building the vocabulary's tables (about a second for 50,000 tokens), then the constraint itself.
    """
    return compile_for(spec, GrammarVocabulary(tokenizer, vocab_size=vocab_size), config)


def compile_for(spec: GrammarSpec, vocabulary: GrammarVocabulary, config: GrammarConfig) -> CompiledGrammar:
    """Compile a constraint for a vocabulary whose tables may be built already; otherwise as `compile`."""
    check_size(spec, config)
    match spec.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return compile_schema(spec, vocabulary, config)
        case GrammarKind.CHOICE:
            return _compile_choice(spec, vocabulary)
        case GrammarKind.REGEX:
            return _compile_regex(spec, vocabulary)
        case GrammarKind.LARK:
            return _compile_lark(spec, vocabulary, config)


def check_size(spec: GrammarSpec, config: GrammarConfig) -> None:
    """Raise unless text and regular expressions are within the limits; before any walk. Pure.

    Raises:
        GrammarTooCostly, InvalidRequest
    """
    num_bytes = _utf8_length(spec.text)
    if num_bytes > config.max_grammar_bytes:
        raise GrammarTooCostly(
            f"a constraint may have at most {config.max_grammar_bytes} bytes (max_grammar_bytes), got {num_bytes}",
            parameter="grammar",
            value=num_bytes,
        )
    if spec.kind == GrammarKind.REGEX:
        check_regex(spec.text, config)


def _utf8_length(text: str) -> int:
    """Give the length in bytes; raise InvalidRequest for a lone surrogate."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequest(
            "a constraint must be valid Unicode (it holds a lone surrogate)", parameter="grammar"
        ) from None


def _compile_choice(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    try:
        choices = spec.payload()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"choices must be a JSON list of strings: {first_line(error)}",
            parameter="choices",
            value=spec.text[:200],
        ) from error
    check_choices(choices)
    for choice in choices:
        _utf8_length(choice)
    return DFAGrammar(spec, vocabulary, dfa=ByteDFA.from_strings(choices))


def _compile_regex(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    pattern = whole_match(spec.text)
    num_states = max_states(pattern)
    limit = MAX_UNICODE_DFA_STATES if _UNICODE_CLASS.search(pattern) else MAX_DFA_STATES
    if num_states is not None and num_states <= limit:
        return DFAGrammar(spec, vocabulary, dfa=ByteDFA.from_regex(pattern))
    return LLGrammar(
        spec,
        vocabulary,
        grammar=llguidance.LLMatcher.grammar_from_regex(pattern),
        report=EnforcementReport(engine=ENGINE),
    )


def _compile_lark(spec: GrammarSpec, vocabulary: GrammarVocabulary, config: GrammarConfig) -> CompiledGrammar:
    """Compile a Lark grammar.

    Forced runs are off: looking for them can make the engine loop for ever.
    """
    from radixrt.grammar.lark_front import to_engine  # Lark takes a sixth of a second to import

    if not spec.text.strip():
        raise InvalidRequest("a Lark grammar must have a rule named start", parameter="grammar", value="")
    grammar = llguidance.LLMatcher.grammar_from_lark(to_engine(spec.text, config))
    return LLGrammar(spec, vocabulary, grammar=grammar, report=EnforcementReport(engine=ENGINE))
