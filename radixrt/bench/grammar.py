"""Coverage, soundness and speed of constrained JSON, beside other engines in the same run.

Needs no model: the tokenizer of the default model, or one of bytes where that cannot be had. The data sets are
JSONSchemaBench (a .jsonl file of {"id", "schema"}) and the JSON-Schema-Test-Suite (a folder of its files).
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from radixrt.bench.grammar_arms import Arm, Compiled, LLGuidanceArm, OutlinesArm, RadixrtArm, RequestError
from radixrt.bench.grammar_extremes import compile_bare, compile_here, measure_hostile
from radixrt.bench.grammar_xgrammar import XgrammarArm, has_xgrammar
from radixrt.errors import GrammarDeadEnd, InvalidRequest, ModelLoadError
from radixrt.grammar.probe import byte_tokenizer
from radixrt.grammar.schema.validator import SchemaValidator
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.model.catalog import load_tokenizer
from radixrt.text.tokenizer import Tokenizer

FOLDERS = (Path("data"), Path("shared/data"), Path("../shared/data"))
MAX_COMPLETION_TOKENS = 256
_MAX_ATTEMPTS = (
    9  # answers per schema, as in the engine; more than one only where finished values are checked
)
NUM_FREE_TOKENS = 48  # then the texts are closed
PEER_LIMIT_S = 2.0
_PEER_BYTES = 8 << 30
_PERCENTILES = (50, 95, 99)
_NUM_WARM = 20  # hits of the cache for each schema


def find_data(folder: Path | None) -> Path:
    """Give the folder with the data sets.

    Raises:
        InvalidRequest: there is none.
    """
    for candidate in (folder,) if folder else FOLDERS:
        if (candidate / "jsonschemabench").is_dir() or (candidate / "json_schema_suite").is_dir():
            return candidate
    raise InvalidRequest(
        "data must be a folder with jsonschemabench/*.jsonl or json_schema_suite/*.json",
        parameter="data",
        value=folder,
    )


def measure(
    folder: Path | None = None,
    *,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Run all arms over the data sets; give plain JSON data with units in the names.

    Args:
        limit: schemas and groups of each data set to look at; default: all.
        tokenizer: default: that of the default model, else bytes.
        only: names of the arms to run; default: all.
    Raises:
        InvalidRequest: no data, or no such arm.
    """
    data = find_data(folder)
    name = "given"
    if tokenizer is None:
        try:
            tokenizer, name = load_tokenizer(), "smollm2-135m"
        except (ModelLoadError, OSError):
            tokenizer, name = byte_tokenizer(), "bytes"
    vocabulary = GrammarVocabulary(tokenizer)
    arms = _arms(vocabulary, only)
    schemas = [
        json.loads(line)["schema"]
        for path in sorted((data / "jsonschemabench").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ][:limit]
    groups = [
        group
        for path in sorted((data / "json_schema_suite").glob("*.json"))
        for group in json.loads(path.read_text(encoding="utf-8"))
    ][:limit]
    assert vocabulary.llguidance_tokenizer is not None  # built now, not in the first schema's time
    measured = {
        "tokenizer": {"name": name, "vocab_size": tokenizer.vocab_size},
        "num_schemas": len(schemas),
        "num_groups": len(groups),
        "arms": {
            arm.name: {
                "schemas": _measure_schemas(arm, schemas, vocabulary),
                "suite": _measure_suite(arm, groups, vocabulary),
                **_measure_extremes(arm, schemas, vocabulary),
            }
            for arm in arms
        },
    }
    for arm in arms:
        if isinstance(arm, RadixrtArm):
            arm.close()
    return measured


def _arms(vocabulary: GrammarVocabulary, only: Sequence[str]) -> list[Arm]:
    makers: dict[str, Callable[[GrammarVocabulary], Arm]] = {
        "radixrt": RadixrtArm,
        "radixrt-check": partial(RadixrtArm, name="radixrt-check", on_unsupported="check"),
        "llguidance": LLGuidanceArm,
        "outlines-core": OutlinesArm,
        **({"xgrammar": XgrammarArm} if has_xgrammar() else {}),
    }
    for name in only:
        if name not in makers:
            raise InvalidRequest(
                f"there is no arm {name!r}: {', '.join(makers)}", parameter="only", value=name
            )
    return [make(vocabulary) for name, make in makers.items() if not only or name in only]


def _measure_extremes(arm: Arm, schemas: Sequence[Any], vocabulary: GrammarVocabulary) -> dict[str, Any]:
    """Measure what only some arms have: a cache, and masks of other constraints than schemas."""
    if isinstance(arm, LLGuidanceArm):
        return {"hostile": measure_hostile(compile_bare, vocabulary)}
    if not isinstance(arm, RadixrtArm):
        return {}
    warm_s: list[float] = []
    for schema in schemas:
        try:
            arm.compile(schema)
        except RequestError:
            continue
        warm_s += arm.warm_s(schema, _NUM_WARM)
    found = {
        "first_compile_ms": round(1e3 * arm.first_compile_s, 1),
        "warm_compile_us": _percentiles(warm_s, 1e6),
    }
    return {**found, "hostile": measure_hostile(compile_here, vocabulary)} if arm.name == "radixrt" else found


def _cpu_s() -> float:
    return time.thread_time()


@dataclass
class _Tally:
    """What one arm did with one schema; travels between processes."""

    compile_s: float | None = None
    mask_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_forced: int = 0
    num_dead_ends: int = 0
    text: str | None = None
    refusal: str = ""


def _try_schema(arm: Arm, schema: Any, number: int, vocabulary: GrammarVocabulary) -> _Tally:
    """Compile a schema and complete one text. Compilations are timed as who waits sees them, masks in CPU time."""
    tally, started = _Tally(), time.perf_counter()
    try:
        compiled = arm.compile(schema)
        tally.compile_s = time.perf_counter() - started
        for attempt in range(_MAX_ATTEMPTS):
            text = _complete(compiled, random.Random(number + 1000 * attempt), vocabulary, tally)
            if text is not None and compiled.is_valid(text):
                tally.text = text
                break
    except GrammarDeadEnd:
        tally.num_dead_ends += 1
    except RequestError as error:
        tally.refusal = _reason(error)
    return tally


def _try_in_child(arm: Arm, schema: Any, number: int, vocabulary: GrammarVocabulary) -> _Tally:
    """Do the same in a process that is ended after PEER_LIMIT_S, as some automata never end."""
    context = multiprocessing.get_context("fork")  # the arm and its vocabulary are there already
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_PEER_BYTES, _PEER_BYTES))
        sender.send(_try_schema(arm, schema, number, vocabulary))

    process = context.Process(target=work)
    process.start()
    sender.close()
    tally = _Tally(refusal=f"over {PEER_LIMIT_S:g} s")
    try:
        if receiver.poll(PEER_LIMIT_S):
            tally = receiver.recv()
    except EOFError:
        tally = _Tally(refusal="died")
    finally:
        process.kill()
        process.join()
        receiver.close()
    return tally


def _measure_schemas(arm: Arm, schemas: Sequence[Any], vocabulary: GrammarVocabulary) -> dict[str, Any]:
    attempt = _try_in_child if isinstance(arm, OutlinesArm | XgrammarArm) else _try_schema
    tallies = [attempt(arm, schema, number, vocabulary) for number, schema in enumerate(schemas)]
    completed = [
        (schema, tally.text) for schema, tally in zip(schemas, tallies, strict=True) if tally.text is not None
    ]
    verdicts = [SchemaValidator.build(schema).judge(text) for schema, text in completed]
    num_tokens = sum(tally.num_tokens for tally in tallies)
    compile_s = [tally.compile_s for tally in tallies if tally.compile_s is not None]
    return {
        "coverage": len(compile_s) / max(len(schemas), 1),
        "refused": dict(Counter(tally.refusal for tally in tallies if tally.refusal).most_common()),
        "completions": len(completed),
        "valid_completions": verdicts.count(True),
        "undecided_completions": verdicts.count(None),
        "dead_ends": sum(tally.num_dead_ends for tally in tallies),
        "forced_share": sum(tally.num_forced for tally in tallies) / max(num_tokens, 1),
        "compile_ms": _percentiles(compile_s, 1e3),
        "mask_us": _percentiles([value for tally in tallies for value in tally.mask_s], 1e6),
    }


def _reason(error: RequestError) -> str:
    keyword = error.parameter.rpartition("/")[2]
    return keyword or type(error).__name__


def _percentiles(seconds: list[float], scale: float) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        **{f"p{percent}": round(cuts[percent - 1] * scale, 3) for percent in _PERCENTILES},
        "max": round(max(seconds) * scale, 3),
    }


def _complete(
    compiled: Compiled, draw: random.Random, vocabulary: GrammarVocabulary, tally: _Tally
) -> str | None:
    """Draw a text: tokens at random, after 48 of them the way to the end; None if it did not end."""
    run, data = compiled.start(), bytearray()
    for step in range(MAX_COMPLETION_TOKENS):
        if run.is_accepting and (step >= NUM_FREE_TOKENS or draw.random() < 0.3):
            break
        tokens = run.forced()
        tally.num_forced += len(tokens)
        if not tokens and step >= NUM_FREE_TOKENS and step % 64 == NUM_FREE_TOKENS % 64:
            tokens = run.closing(MAX_COMPLETION_TOKENS) or []
        if not tokens:
            started = _cpu_s()
            run.fill()
            tally.mask_s.append(_cpu_s() - started)
            allowed = run.allowed()
            if not allowed:
                break
            tokens = [_draw(allowed, draw, vocabulary, step)]
        for token_id in tokens:
            if not run.accept(token_id):
                return None
            data += vocabulary.vocab_bytes[token_id]
        tally.num_tokens += len(tokens)
    return data.decode("utf-8", "replace") if run.is_accepting else None


def _draw(allowed: Sequence[int], draw: random.Random, vocabulary: GrammarVocabulary, step: int) -> int:
    """Draw a token; later on rather one that closes something."""
    if step > NUM_FREE_TOKENS // 2:
        closing = [item for item in allowed if not vocabulary.vocab_bytes[item].strip(b'"}],')]
        if closing:
            return draw.choice(closing)
    return draw.choice(allowed)


def _measure_suite(
    arm: Arm, groups: Sequence[Mapping[str, Any]], vocabulary: GrammarVocabulary
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for group in groups:
        try:
            accepts = _judge(arm, group["schema"], vocabulary)
        except RequestError as error:
            refused[_reason(error)] += 1
            continue
        verdicts = [(accepts(_text(case["data"])), case["valid"]) for case in group["tests"]]
        counts["exact"] += all(is_accepted == is_valid for is_accepted, is_valid in verdicts)
        counts["invalid"] += sum(is_accepted and not is_valid for is_accepted, is_valid in verdicts)
        counts["rejected"] += sum(is_valid and not is_accepted for is_accepted, is_valid in verdicts)
    return {
        "exact_groups": counts["exact"],
        "refused_groups": sum(refused.values()),
        "refused": dict(refused.most_common()),
        "invalid_accepted": counts["invalid"],
        "valid_rejected": counts["rejected"],
    }


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _judge(arm: Arm, schema: Any, vocabulary: GrammarVocabulary) -> Callable[[str], bool]:
    """Give the engine's verdict on whole texts: token by token, or by outlines-core's regular expression."""
    if isinstance(arm, OutlinesArm):
        pattern = arm.pattern(schema)
        return lambda text: pattern.fullmatch(text) is not None
    compiled = arm.compile(schema)

    def accepts(text: str) -> bool:
        run, data = compiled.start(), text.encode()
        while data:
            token_id = (run.forced() or [vocabulary.byte_ids.get(data[0], -1)])[0]
            token = vocabulary.vocab_bytes[token_id]
            if token_id < 0 or not data.startswith(token) or not run.accept(token_id):
                return False
            data = data[len(token) :]
        return run.is_accepting and compiled.is_valid(text)

    return accepts


def report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a short table."""
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("schemas taken", lambda arm: f"{100 * arm['schemas']['coverage']:.1f}%"),
        ("random completions valid", lambda arm: f"{arm['schemas']['valid_completions']}/{arm['schemas']['completions']}"),
        ("  cannot be judged", lambda arm: str(arm["schemas"]["undecided_completions"])),
        ("compile ms p50 / p95 / max", lambda arm: _spread(arm["schemas"]["compile_ms"], ("p50", "p95", "max"))),
        ("  the first, process included", lambda arm: _number(arm.get("first_compile_ms"))),
        ("warm compile us p50 / p95", lambda arm: _spread(arm.get("warm_compile_us", {}), ("p50", "p95"))),
        ("mask us p50 / p95 / p99", lambda arm: _spread(arm["schemas"]["mask_us"], ("p50", "p95", "p99"))),
        ("hostile masks worst ms", lambda arm: _number(arm.get("hostile", {}).get("worst_ms"))),
        ("forced tokens", lambda arm: f"{100 * arm['schemas']['forced_share']:.1f}%"),
        ("suite: groups exact", lambda arm: str(arm["suite"]["exact_groups"])),
        ("suite: groups refused", lambda arm: str(arm["suite"]["refused_groups"])),
        ("suite: invalid accepted", lambda arm: str(arm["suite"]["invalid_accepted"])),
        ("suite: valid rejected", lambda arm: str(arm["suite"]["valid_rejected"])),
    ]  # fmt: skip
    arms = measured["arms"]
    header = f"{measured['num_schemas']} schemas, {measured['num_groups']} groups of the suite, tokenizer {measured['tokenizer']['name']}"
    table = [("", *arms), *((label, *(cell(arm) for arm in arms.values())) for label, cell in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(arms) + 1)]
    lines = [header, ""]
    for label, *cells in table:
        columns = "".join(f"   {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{label:<{widths[0]}}{columns}".rstrip())
    refused = next(iter(arms.values()))["schemas"]["refused"]
    lines.append(
        f"\nrefused by radixrt: {', '.join(f'{name} {count}' for name, count in refused.items()) or 'none'}"
    )
    return "\n".join(lines)


def _spread(values: Mapping[str, float], names: Sequence[str]) -> str:
    return " / ".join(_number(values.get(name)) for name in names)


def _number(value: float | None) -> str:
    """Write a measured number with two or three digits that mean something, never as a power of ten. Pure."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
