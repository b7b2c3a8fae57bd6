"""Constrained answers of a real model: complete at every budget, few passes, the same with and without forced runs."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from radixrt.constraints import Whitespace
from radixrt.engine import Engine
from radixrt.errors import InvalidRequest
from radixrt.grammar.schema.validator import SchemaValidator
from radixrt.types import FinishReason, GenerationOutput, GrammarSpec, SamplingParams

MAX_TOKENS = 128
_POLICIES: tuple[Whitespace, ...] = ("none", "compact", "flexible")
NUM_PROMPTS = 64
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["teacher", "farmer", "engineer", "artist"]},
        "languages": {"type": "array", "items": {"type": "string"}},
        "height_m": {"type": "number"},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "occupation", "languages", "height_m", "is_member"],
    "additionalProperties": False,
}
_TOWNS = ("Arden", "Brook", "Calder", "Dunmore", "Elm", "Firth", "Glen", "Harrow")
_TRAITS = ("kind", "tall", "old", "busy", "quiet", "famous", "young", "curious")


def prompts() -> list[str]:
    """Give the 64 prompts."""
    return [f"Describe a {trait} person from {town} as JSON:\n" for town in _TOWNS for trait in _TRAITS]


def measure_model(
    model: str, *, budget_step: int = 1, num_prompts: int = NUM_PROMPTS, **options: Any
) -> dict[str, Any]:
    """Generate under one schema of six fields; give plain JSON data with units in the names.

    Args:
        budget_step: distance of the values of max_tokens that are tried, from the smallest answer to 128.
        options: of the engines.
    """
    grammar = GrammarSpec.json_schema(SCHEMA)
    texts = prompts()[:num_prompts]
    with Engine(model, **options) as engine:
        smallest = smallest_budget(engine, grammar)
        found: dict[str, Any] = {
            "model": model,
            "num_prompts": len(texts),
            "smallest_budget_tokens": smallest,
        }
        found["budgets"] = _measure_budgets(
            engine, grammar, texts, range(smallest, MAX_TOKENS + 1, budget_step)
        )
        found["passes"] = {
            whitespace: _measure_passes(engine, GrammarSpec.json_schema(SCHEMA, whitespace=whitespace), texts)
            for whitespace in _POLICIES
        }
        with_runs = _greedy(engine, grammar, texts)
    with Engine(model, **{**options, "forced_runs": False}) as engine:
        without_runs = _greedy(engine, grammar, texts)
    found["forced_runs"] = _compare(with_runs, without_runs)
    return found


def smallest_budget(engine: Engine, grammar: GrammarSpec) -> int:
    """Give the number of tokens that the refusal of max_tokens = 1 names."""
    try:
        engine.generate("x", SamplingParams(max_tokens=1, grammar=grammar))
    except InvalidRequest as error:
        named = re.search(r"at least (\d+)", str(error))
        if named is not None:
            return int(named[1])
    return 1


def _measure_budgets(
    engine: Engine, grammar: GrammarSpec, texts: Sequence[str], budgets: range
) -> dict[str, Any]:
    """Generate every prompt with every budget at temperature 1."""
    validator = SchemaValidator.build(SCHEMA)
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for budget in budgets:
        sampling = [
            SamplingParams(max_tokens=budget, temperature=1.0, seed=1000 * budget + index, grammar=grammar)
            for index in range(len(texts))
        ]
        for output in engine.generate(texts, sampling):
            counts["answers"] += 1
            counts["valid"] += validator.judge(output.text) is True
            counts["cut_off"] += output.finish_reason is FinishReason.LENGTH
            counts["over_budget"] += len(output.token_ids) > budget
            counts["tokens"] += len(output.token_ids)
            counts["forced"] += output.usage.forced_tokens
    stats = engine.stats().grammar
    return {
        "first_budget_tokens": budgets.start,
        "last_budget_tokens": budgets.stop - 1,
        **{name: counts[name] for name in ("answers", "valid", "cut_off", "over_budget")},
        "forced_share": counts["forced"] / max(counts["tokens"], 1),
        "removed_probability": stats.removed_probability,
        "mask_us_p50": 1e6 * stats.mask_s.quantile_s(0.5),
        "mask_us_p99": 1e6 * stats.mask_s.quantile_s(0.99),
        "seconds": time.perf_counter() - started,
    }


def _measure_passes(engine: Engine, grammar: GrammarSpec, texts: Sequence[str]) -> dict[str, Any]:
    """Count forward passes per output token, one request at a time."""
    shares, num_passes, num_tokens = [], 0, 0
    for index, text in enumerate(texts):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=index, grammar=grammar)
        before = engine.stats().num_steps
        output = engine.generate(text, sampling)
        passes = engine.stats().num_steps - before
        num_passes, num_tokens = num_passes + passes, num_tokens + len(output.token_ids)
        shares.append(passes / len(output.token_ids))
    return {
        "passes_per_token": num_passes / num_tokens,
        "mean_of_prompts": statistics.mean(shares),
        "worst": max(shares),
    }


def _greedy(engine: Engine, grammar: GrammarSpec, texts: Sequence[str]) -> list[GenerationOutput]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, grammar=grammar)
    return engine.generate(texts, sampling)


def _compare(ones: Sequence[GenerationOutput], others: Sequence[GenerationOutput]) -> dict[str, Any]:
    validator = SchemaValidator.build(SCHEMA)
    different = [
        (one.text, other.text) for one, other in zip(ones, others, strict=True) if one.text != other.text
    ]
    return {
        "equal_share": 1 - len(different) / len(ones),
        "valid_share": statistics.mean(validator.judge(output.text) is True for output in (*ones, *others)),
        "forced_tokens_with": sum(output.usage.forced_tokens for output in ones),
        "forced_tokens_without": sum(output.usage.forced_tokens for output in others),
        "differences": different[:4],
    }


def report_model(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a short text."""
    budgets, passes, runs = measured["budgets"], measured["passes"], measured["forced_runs"]
    lines = [
        f"{measured['model']}: {measured['num_prompts']} prompts, a schema of six fields, temperature 1",
        f"smallest answer                {measured['smallest_budget_tokens']} tokens (a budget below is refused)",
        f"max_tokens {budgets['first_budget_tokens']} to {budgets['last_budget_tokens']:<15} "
        f"{budgets['valid']}/{budgets['answers']} valid, {budgets['cut_off']} cut off, {budgets['over_budget']} over",
        f"forced tokens                  {100 * budgets['forced_share']:.1f}%",
        f"probability removed by masks   {100 * budgets['removed_probability']:.1f}%",
        f"mask p50 / p99                 <= {budgets['mask_us_p50']:.0f} / {budgets['mask_us_p99']:.0f} us",
        *(
            f"forward passes per token       {item['passes_per_token']:.3f} with whitespace={policy!r} "
            f"(mean of prompts {item['mean_of_prompts']:.3f}, worst {item['worst']:.3f})"
            for policy, item in passes.items()
        ),
        f"greedy, forced runs on = off   {100 * runs['equal_share']:.1f}% of prompts, {100 * runs['valid_share']:.1f}% valid",
    ]
    lines += [f"  with:    {one!r}\n  without: {other!r}" for one, other in runs["differences"]]
    return "\n".join(lines)
