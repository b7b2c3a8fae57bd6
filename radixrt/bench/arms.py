"""Our engine as an arm of a comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from radixrt.bench.prompts import Ids
from radixrt.constraints import GrammarSpec
from radixrt.engine import Engine
from radixrt.types import SamplingParams


class EngineArm:
    """Our engine in this process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.engine = Engine(**options)

    def reset(self) -> None:
        self.engine.clear_cache()

    def generate(self, prompts: Sequence[Ids], max_tokens: int | Sequence[int]) -> tuple[list[Ids], float]:
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        sampling = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in counts]
        started = time.perf_counter()
        outputs = self.engine.generate(list(prompts), sampling)
        seconds = time.perf_counter() - started
        return [list(output.token_ids) for output in outputs], seconds

    def generate_json(
        self, prompts: Sequence[Ids], schema: Mapping[str, Any], max_tokens: int
    ) -> tuple[list[str], float]:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, grammar=GrammarSpec.json_schema(schema)
        )
        started = time.perf_counter()
        outputs = self.engine.generate(list(prompts), sampling)
        seconds = time.perf_counter() - started
        return [output.text for output in outputs], seconds

    def close(self) -> None:
        self.engine.close()
