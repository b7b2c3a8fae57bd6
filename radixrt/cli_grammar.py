"""radixrt grammar: check, explain and sample a JSON Schema without a model; radixrt bench grammar."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from radixrt.errors import InvalidRequest, RequestError, first_line, suggest

grammar_app = typer.Typer(no_args_is_help=True, help="Try a constraint without a model.")
console = Console(highlight=False)

SchemaFile = Annotated[
    Path, typer.Argument(metavar="SCHEMA.json", help="a JSON Schema; a .lark or .gbnf grammar works too")
]
ModelName = Annotated[str, typer.Option("--tokenizer", help='model whose tokenizer is used, or "bytes"')]
_MAX_SAMPLE_TOKENS = 512


@grammar_app.command()
def check(
    schema: SchemaFile,
    *,
    instance: Annotated[Path | None, typer.Option(help="a value (for a grammar: a text) to check")] = None,
    on_unsupported: Annotated[str, typer.Option(help="refuse, or check the finished value")] = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say how each keyword is enforced and whether a value would be let through; status 1 if not."""
    try:
        grammar = _compile(schema, "bytes", on_unsupported)
    except RequestError as error:
        found: dict[str, Any] = {"supported": False, "parameter": error.parameter, "reason": str(error)}
        typer.echo(json.dumps(found)) if as_json else _say(f"refused: {error}")
        raise typer.Exit(1) from None
    keywords = dict(grammar.report.keywords)
    warnings = [_warning(place) for place in grammar.report.unknown]
    found = {"supported": True, "engine": grammar.report.engine, "keywords": keywords, "warnings": warnings}
    if instance is not None:
        is_json = _kind(schema) == "json_schema"
        text = _compact(_read(instance)) if is_json else _read(instance)
        found["accepted"] = _accepts(grammar, text)
        found["valid"] = grammar.check(text)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        width = max(10, *map(len, keywords.values()))
        for pointer, enforcement in keywords.items():
            _say(f"{enforcement:<{width}} {pointer or '(all of it)'}")
        for warning in warnings:
            _say(f"warning: {warning}")
        if instance is not None:
            _say(f"the value is {'valid' if found['valid'] else 'not valid'}, and masks {'allow' if found['accepted'] else 'do not allow'} it")  # fmt: skip
    if instance is not None and not (found["accepted"] and found["valid"]):
        raise typer.Exit(1)


@grammar_app.command()
def explain(
    schema: SchemaFile,
    *,
    text: Annotated[str, typer.Option(help="what has been written so far")] = "",
    token: Annotated[str | None, typer.Option(help="text of a next token")] = None,
    tokenizer: ModelName = "bytes",
) -> None:
    """Say what may come next after a text, and why a token may not."""
    grammar = _compile(schema, tokenizer)
    matcher, vocabulary = grammar.start(), _vocabulary(tokenizer)
    for token_id in _tokens(vocabulary, text):
        if not matcher.accept(token_id):
            _say(f"after this text: {matcher.explain_mask(token_id).reason}")
            raise typer.Exit(1)
    wanted = _tokens(vocabulary, token)[0] if token else -1
    found = matcher.explain_mask(wanted)
    if token:
        _say(f"{token!r}: {found.reason}")
    if forced := matcher.forced_tokens():
        _say(f"forced: {b''.join(vocabulary.vocab_bytes[item] for item in forced)!r}")
    _say(f"{'complete; ' if matcher.is_accepting else ''}{found.num_allowed} tokens may follow, among them:")
    _say("  " + "  ".join(repr(item.decode("utf-8", "replace")) for item in found.allowed_bytes))


@grammar_app.command()
def sample(
    schema: SchemaFile,
    *,
    count: Annotated[int, typer.Option("-n", min=1, max=1000, help="how many texts")] = 3,
    seed: Annotated[int, typer.Option(help="seed of the random choices")] = 0,
    tokenizer: ModelName = "bytes",
) -> None:
    """Print random texts that satisfy the constraint."""
    grammar, vocabulary = _compile(schema, tokenizer), _vocabulary(tokenizer)
    for number in range(count):
        _say(_random_text(grammar, vocabulary, random.Random(seed + number)))


def bench_grammar(
    *,
    data: Annotated[Path | None, typer.Option(help="folder of the data sets")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="schemas and groups to look at")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="an arm to run; may be repeated; default: all")
    ] = None,
    model: Annotated[str | None, typer.Option(help="measure this model's answers instead")] = None,
    budget_step: Annotated[
        int, typer.Option(min=1, help="with --model: every so many values of max_tokens")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure constrained JSON: coverage, soundness and speed beside other engines, or a model's answers."""
    if model is not None:
        from radixrt.bench.grammar_model import measure_model, report_model

        answers = measure_model(model, budget_step=budget_step)
        typer.echo(json.dumps(answers) if as_json else report_model(answers))
        return
    from radixrt.bench.grammar import measure, report

    measured = measure(data, limit=limit, only=only or ())
    typer.echo(json.dumps(measured) if as_json else report(measured))


def _warning(place: str) -> str:
    """Say that a keyword may be a misspelt one."""
    from radixrt.grammar.schema.keywords import KNOWN

    name = place.rpartition("/")[2].replace("~1", "/").replace("~0", "~")
    return f"no draft knows the keyword {json.dumps(name)} at {place}: it constrains nothing.{suggest(name, KNOWN)}"


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"cannot read {path}: {first_line(error)}", parameter="path", value=str(path)
        ) from None


def _compact(text: str) -> str:
    try:
        return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    except ValueError as error:
        raise InvalidRequest(f"the value is not JSON: {first_line(error)}", parameter="instance") from None


def _vocabulary(tokenizer: str) -> Any:
    from radixrt.grammar.probe import byte_tokenizer
    from radixrt.grammar.vocabulary import GrammarVocabulary
    from radixrt.model.catalog import load_tokenizer

    return GrammarVocabulary(byte_tokenizer() if tokenizer == "bytes" else load_tokenizer(tokenizer))


def _kind(path: Path) -> str:
    return {".lark": "lark", ".gbnf": "ebnf"}.get(path.suffix, "json_schema")


def _compile(path: Path, tokenizer: str, on_unsupported: Any = "refuse") -> Any:
    from radixrt.constraints import GrammarKind, GrammarSpec
    from radixrt.grammar.compile import DEFAULT_LIMITS, compile_for

    spec = GrammarSpec(GrammarKind(_kind(path)), _read(path), on_unsupported=on_unsupported)
    return compile_for(spec, _vocabulary(tokenizer), DEFAULT_LIMITS)


def _tokens(vocabulary: Any, text: str) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode_continuation(text)
    return ids


def _accepts(grammar: Any, text: str) -> bool:
    matcher = grammar.start()
    return all(matcher.accept(byte) for byte in text.encode()) and bool(matcher.is_accepting)


def _random_text(grammar: Any, vocabulary: Any, draw: random.Random) -> str:
    import numpy as np

    matcher, data = grammar.start(), bytearray()
    row = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    for step in range(_MAX_SAMPLE_TOKENS):
        if matcher.is_accepting and draw.random() < 0.3:
            break
        tokens = matcher.forced_tokens()
        if not tokens and step > 40:
            tokens = matcher.closing_run(_MAX_SAMPLE_TOKENS) or []
        if not tokens:
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            if not allowed:
                break
            plain = [item for item in allowed if vocabulary.vocab_bytes[item].isascii() and vocabulary.vocab_bytes[item].isalnum()]  # fmt: skip
            tokens = [draw.choice(plain if plain and draw.random() < 0.8 else allowed)]
        for token_id in tokens:
            matcher.accept(token_id)
            data += vocabulary.vocab_bytes[token_id]
    return data.decode("utf-8", "replace")
