"""From a constraint to masks: which engine takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import llguidance

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec, check_choices
from radixrt.errors import GrammarTooCostly, InvalidRequest, first_line
from radixrt.grammar.closing import Shortcuts
from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.engines.dfa import DFAGrammar
from radixrt.grammar.engines.llg import ENGINE, LLGrammar
from radixrt.grammar.matcher import CompiledGrammar, EnforcementReport
from radixrt.grammar.regex_cost import check_regex, max_states, whole_match
from radixrt.grammar.schema.compile import compile_schema, shortest_match
from radixrt.grammar.structural import compile_structural
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.text.tokenizer import Tokenizer

DEFAULT_LIMITS = GrammarConfig()

# Above these bounds a regular expression goes to llguidance, which builds its automaton as it goes. Classes of all
# of Unicode take hundreds of byte states a character, so they count against the lower one.
MAX_DFA_STATES = 2048 + 512
MAX_UNICODE_DFA_STATES = 64
_MAX_ENDER_CHARACTERS = 32
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
    try:
        return _compiled(spec, vocabulary, config)
    except RecursionError:
        raise GrammarTooCostly(
            "the constraint is nested too deep to be compiled", parameter="grammar", value=spec.text[:200]
        ) from None


def _compiled(spec: GrammarSpec, vocabulary: GrammarVocabulary, config: GrammarConfig) -> CompiledGrammar:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return compile_schema(spec, vocabulary, config)
        case GrammarKind.CHOICE:
            return _compile_choice(spec, vocabulary)
        case GrammarKind.REGEX:
            return _compile_regex(spec, vocabulary)
        case GrammarKind.LARK | GrammarKind.EBNF:
            return _compile_rules(spec, vocabulary, config)
        case GrammarKind.STRUCTURAL:
            return compile_structural(spec, vocabulary, config)


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
        shortcuts=partial(_regex_enders, pattern, vocabulary),
    )


def _compile_rules(
    spec: GrammarSpec, vocabulary: GrammarVocabulary, config: GrammarConfig
) -> CompiledGrammar:
    """Compile a Lark or GBNF grammar.

    The engine's search for forced runs is off, since it can loop for ever; a bounded one of ours takes its place.
    """
    from radixrt.grammar.ebnf_front import ebnf_to_engine  # Lark takes a sixth of a second to import
    from radixrt.grammar.lark_front import to_engine

    if not spec.text.strip():
        name = "start" if spec.kind is GrammarKind.LARK else "root"
        raise InvalidRequest(f"the grammar must have a rule named {name}", parameter="grammar", value="")
    translate = to_engine if spec.kind is GrammarKind.LARK else ebnf_to_engine
    found = translate(spec.text, config)
    return LLGrammar(
        spec,
        vocabulary,
        grammar=llguidance.LLMatcher.grammar_from_lark(found.text),
        report=EnforcementReport(engine=ENGINE),
        shortcuts=partial(_enders, found.endings, vocabulary),
        follows_bytes=True,
    )


def _enders(texts: Sequence[str], vocabulary: GrammarVocabulary) -> Shortcuts:
    return Shortcuts(enders=tuple(tuple(vocabulary.tokenizer.encode_continuation(text)) for text in texts))


def _regex_enders(pattern: str, vocabulary: GrammarVocabulary) -> Shortcuts:
    text = (shortest_match(pattern) or "")[-_MAX_ENDER_CHARACTERS:]
    return _enders([text[start:] for start in range(len(text) - 1, -1, -1)], vocabulary)
