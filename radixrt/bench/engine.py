"""Whole-engine times: prefill, decode, and few-shot requests with and without the prefix cache.

Each figure is a median of several repetitions; arms that are compared alternate within one run.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from radixrt.engine import Engine
from radixrt.types import SamplingParams

NUM_REPETITIONS = 3
PREFILL_LENGTHS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT = 64
DECODE_STEPS = 24
NUM_SHARED_TOKENS, NUM_OWN_TOKENS, NUM_REQUESTS, NUM_NEW_TOKENS = 1500, 60, 16, 8


def measure(options: Mapping[str, Any], *, num_repetitions: int = NUM_REPETITIONS) -> dict[str, Any]:
    """Run all measurements; give plain JSON data with units in the names."""
    arms = {"cache_on": Engine(**options), "cache_off": Engine(**{**options, "prefix_cache": False})}
    try:
        engine = arms["cache_off"]
        config = engine.config
        draw = random.Random(0)
        return {
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "threads": config.num_threads,
                "kernels": config.options.model.kernels,
                "device": config.device.type,
                "dtype": str(config.dtype).removeprefix("torch."),
                "torch": torch.__version__,
                "model": config.options.model.model,
            },
            "prefill_tokens_per_s": {
                str(length): length / _median(partial(_prefill, engine, draw, length), num_repetitions)
                for length in PREFILL_LENGTHS
                if length < config.max_context
            },
            "decode_ms_per_step": {
                str(batch): 1000 * _median(partial(_decode, engine, draw, batch), num_repetitions)
                for batch in DECODE_BATCHES
            },
            "few_shot": _few_shot(arms, draw, num_repetitions),
        }
    finally:
        for opened in arms.values():
            opened.close()


def _median(run: Callable[[], float], num_repetitions: int) -> float:
    run()  # warm up
    return statistics.median(run() for _ in range(num_repetitions))


def _ids(engine: Engine, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(engine.config.num_token_ids // 2) for _ in range(count)]


def _prefill(engine: Engine, draw: random.Random, length: int) -> float:
    """Give the seconds of one prompt to its first token."""
    prompt = _ids(engine, draw, length)
    started = time.perf_counter()
    engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - started


def _decode(engine: Engine, draw: random.Random, num_sequences: int) -> float:
    """Give the seconds per step of a batch, from the difference of a long and a short run."""
    prompts = [_ids(engine, draw, DECODE_CONTEXT) for _ in range(num_sequences)]
    seconds = []
    for num_tokens in (2, 2 + DECODE_STEPS):
        started = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / DECODE_STEPS


def _few_shot(arms: Mapping[str, Engine], draw: random.Random, num_repetitions: int) -> dict[str, Any]:
    """Time requests that share a prefix, arm by arm in turn; the prefix is new in every repetition."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    hit_rate = 0.0
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)
    for _ in range(num_repetitions):
        any_engine = next(iter(arms.values()))
        shared = _ids(any_engine, draw, NUM_SHARED_TOKENS)
        prompts = [shared + _ids(any_engine, draw, NUM_OWN_TOKENS) for _ in range(NUM_REQUESTS)]
        for name, engine in arms.items():
            started = time.perf_counter()
            outputs = engine.generate(prompts, sampling)
            seconds[name].append(time.perf_counter() - started)
            if name == "cache_on":
                cached = sum(output.usage.cached_tokens for output in outputs)
                hit_rate = cached / sum(output.usage.prompt_tokens for output in outputs)
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {
        **medians,
        "speedup": medians["cache_off_s"] / medians["cache_on_s"],
        "hit_rate": hit_rate,
        "num_requests": NUM_REQUESTS,
        "num_shared_tokens": NUM_SHARED_TOKENS,
        "num_own_tokens": NUM_OWN_TOKENS,
        "num_new_tokens": NUM_NEW_TOKENS,
    }


def report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a short text."""
    machine, few_shot = measured["machine"], measured["few_shot"]
    lines = [
        f"{machine['model']} on {machine['device']}, {machine['dtype']}, {machine['threads']} threads, "
        f"torch {machine['torch']}"
    ]
    lines += [
        f"prefill {length} tokens: {rate:.0f} tokens/s"
        for length, rate in measured["prefill_tokens_per_s"].items()
    ]
    lines += [
        f"decode, batch {batch}, context {DECODE_CONTEXT}: {milliseconds:.1f} ms/step"
        for batch, milliseconds in measured["decode_ms_per_step"].items()
    ]
    lines.append(
        f"few-shot, {few_shot['num_requests']} requests on {few_shot['num_shared_tokens']} shared tokens: "
        f"{few_shot['cache_off_s']:.2f} s without cache, {few_shot['cache_on_s']:.2f} s with it "
        f"({few_shot['speedup']:.1f}x; {100 * few_shot['hit_rate']:.0f}% of prompt tokens from cache)"
    )
    return "\n".join(lines)
