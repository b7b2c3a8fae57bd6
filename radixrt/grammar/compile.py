"""From a constraint to masks: which engine takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
from radixrt.grammar.prepared import Marks, Prepared
from radixrt.grammar.regex_cost import check_regex, max_states, whole_match
from radixrt.grammar.schema import compile as schema_compile
from radixrt.grammar.schema.compile import schema_text, shortest_match
from radixrt.grammar.schema.validator import late_judge
from radixrt.grammar.structural import prepare_structural
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.text.tokenizer import Tokenizer

DEFAULT_LIMITS = GrammarConfig()

# Above these bounds a regular expression goes to llguidance, which builds its automaton as it goes. Classes of all
# of Unicode take hundreds of byte states a character, so they count against the lower one.
MAX_DFA_STATES = 2048 + 512
MAX_UNICODE_DFA_STATES = 16
_MAX_ENDER_CHARACTERS = 32
_UNICODE_CLASS = re.compile(r"\\[wWDSpP]")


def compile(
    spec: GrammarSpec,
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    config: GrammarConfig = DEFAULT_LIMITS,
) -> CompiledGrammar:
    """Compile a constraint for one vocabulary, in this process: for tools and tests, which write their own.

    What strangers write belongs into a `GrammarCache`, as in `Engine`: it reads every constraint in another process,
    which may be ended, or end itself, at no cost to this one, and shares the work between requests.

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
    return build(spec, prepare(spec, marks_of(spec, vocabulary), config), vocabulary)


def marks_of(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> Marks:
    """Give the names of the vocabulary's tokens that a constraint may hold as themselves. Pure."""
    if spec.kind is not GrammarKind.STRUCTURAL:
        return Marks()
    text, tokenizer = spec.text, vocabulary.tokenizer
    ends = map(tokenizer.token_text, tokenizer.eos_ids)
    return Marks(
        tuple(name for name in vocabulary.control_ids if json.dumps(name, ensure_ascii=False)[1:-1] in text),
        tuple(name for name in ends if json.dumps(name, ensure_ascii=False)[1:-1] in text),
    )


def prepare(spec: GrammarSpec, marks: Marks, config: GrammarConfig) -> Prepared:
    """Read and rewrite a constraint, which needs no vocabulary: most of the work, and all that hostile ones can make
    long.

    Raises: what `compile` raises.
    """
    check_size(spec, config)
    try:
        return _prepared(spec, marks, config)
    except RecursionError:
        raise GrammarTooCostly(
            "the constraint is nested too deep to be compiled", parameter="grammar", value=spec.text[:200]
        ) from None


def build(spec: GrammarSpec, prepared: Prepared, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Make what runs out of what `prepare` gave.

    Raises: what `compile` raises.
    Cost: llguidance reads the grammar, without the interpreter's lock: 1.4 ms for the median schema of
        JSONSchemaBench, 0.2 s for 512 tools.
    """
    if prepared.automaton is not None:
        return DFAGrammar(spec, vocabulary, dfa=prepared.automaton)
    judge: Callable[[str], bool | None] | None = None
    if prepared.draft is not None:
        judge = late_judge(schema_text(spec), prepared.draft)
    return LLGrammar(
        spec,
        vocabulary,
        grammar=prepared.grammar,
        report=EnforcementReport(prepared.keywords, ENGINE),
        judge=judge,
        hints=prepared.hints,
        shortcuts=partial(_shortcuts, prepared, vocabulary),
        control_ids={name: vocabulary.control_ids[name] for name in prepared.controls},
        follows_bytes=prepared.is_of_user,
    )


def _prepared(spec: GrammarSpec, marks: Marks, config: GrammarConfig) -> Prepared:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return schema_compile.prepare(spec, config)
        case GrammarKind.CHOICE:
            return _prepare_choice(spec)
        case GrammarKind.REGEX:
            return _prepare_regex(spec)
        case GrammarKind.LARK | GrammarKind.EBNF:
            return _prepare_rules(spec, config)
        case GrammarKind.STRUCTURAL:
            return prepare_structural(spec, marks, config)


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


def _prepare_choice(spec: GrammarSpec) -> Prepared:
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
    return Prepared(automaton=ByteDFA.from_strings(choices))


def _prepare_regex(spec: GrammarSpec) -> Prepared:
    pattern = whole_match(spec.text)
    num_states = max_states(pattern)
    limit = MAX_UNICODE_DFA_STATES if _UNICODE_CLASS.search(pattern) else MAX_DFA_STATES
    if num_states is not None and num_states <= limit:
        return Prepared(automaton=ByteDFA.from_regex(pattern))
    text = (shortest_match(pattern) or "")[-_MAX_ENDER_CHARACTERS:]
    return Prepared(
        grammar=llguidance.LLMatcher.grammar_from_regex(pattern),
        enders=tuple(text[start:] for start in range(len(text) - 1, -1, -1)),
    )


def _prepare_rules(spec: GrammarSpec, config: GrammarConfig) -> Prepared:
    """Translate a Lark or GBNF grammar.

    The engine's search for forced runs is off, since it can loop for ever; a bounded one of ours takes its place.
    """
    from radixrt.grammar.ebnf_front import ebnf_to_engine  # Lark takes a sixth of a second to import
    from radixrt.grammar.lark_front import to_engine

    if not spec.text.strip():
        name = "start" if spec.kind is GrammarKind.LARK else "root"
        raise InvalidRequest(f"the grammar must have a rule named {name}", parameter="grammar", value="")
    translate = to_engine if spec.kind is GrammarKind.LARK else ebnf_to_engine
    found = translate(spec.text, config)
    return Prepared(
        grammar=llguidance.LLMatcher.grammar_from_lark(found.text),
        is_of_user=True,
        enders=tuple(found.endings),
    )


def _shortcuts(prepared: Prepared, vocabulary: GrammarVocabulary) -> Shortcuts:
    """Give the runs of tokens that lead to an end."""
    ids = {name: vocabulary.control_ids[name] for name in prepared.controls}
    newline = vocabulary.byte_ids.get(ord("\n"))
    return Shortcuts(
        openers=tuple(tuple(vocabulary.encode_marked(text, ids)) for text in prepared.openers),
        probe=() if newline is None else (newline,),
        num_openers=prepared.num_openers,
        enders=tuple(tuple(vocabulary.encode_marked(text, ids)) for text in prepared.enders),
    )
