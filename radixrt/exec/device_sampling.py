"""What sampling on the device needs, as arrays: a row of numbers per draw, tables for the few that need more.

The numbers travel with the step. The tables (masks, biases, counts of tokens) and the wanted logprobs follow in one
copy more once the step before is known, and only where a row needs them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from radixrt.exec.batch import MASK_WORD_BITS, SampleRow, banned_ids, is_measured
from radixrt.exec.draw import has_penalty
from radixrt.sched.plan import SEQUENCE, Chunk
from radixrt.sched.sequence import Sequence
from radixrt.types import SamplingParams

MASK_64 = (1 << 64) - 1
SEED = attrgetter("seed")
INPUT_FIELDS = ("numbers", "top_k", "keys", "mask_rows", "bias_rows", "penalty_rows")  # of SampleInputs
TABLE_FIELDS = ("mask", "bias", "output_counts", "prompt_bits")
DRAW_FIELDS = ("draw_rows", *INPUT_FIELDS)  # what sampling reads of a step's arrays


class DrawNumbers:
    """Own the numbers of the last step's draws; while the same sequences are drawn, only what moves is made anew.

    Invariant: _arrays are those of _sequences with these _seeds, but for the positions.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._seeds: list[int] = []
        self._arrays = draw_arrays(())
        self._may_shift = False  # biases and bans before min_tokens depend on the position

    def update(self, draws: Seq[Chunk]) -> dict[str, npt.NDArray[Any]]:
        """Give the numbers of each row to draw; see draw_arrays."""
        sequences = list(map(SEQUENCE, draws))
        seeds = list(map(SEED, sequences))  # a sequence whose answer was taken back has another one
        if sequences != self._sequences or seeds != self._seeds:
            self._sequences, self._seeds, self._arrays = sequences, seeds, draw_arrays(draws)
            params = [sequence.sampling for sequence in sequences]
            self._may_shift = any(sampling.logit_bias or sampling.min_tokens for sampling in params)
            return self._arrays
        arrays = {**self._arrays, "keys": self._arrays["keys"].copy()}
        arrays["keys"][:, 2] = [chunk.stop for chunk in draws]
        if self._may_shift:
            arrays["bias_rows"] = _places([_has_bias(chunk) for chunk in draws])
        return arrays


def draw_arrays(draws: Seq[Chunk]) -> dict[str, npt.NDArray[Any]]:
    """Give the numbers of each row to draw, as SampleInputs names them. Pure."""
    params = [chunk.sequence.sampling for chunk in draws]
    return {
        "numbers": np.array([_numbers(sampling) for sampling in params], np.float64).reshape(-1, 6),
        "top_k": np.array([sampling.top_k for sampling in params], np.int32),
        "keys": np.array(
            [(chunk.sequence.seed & MASK_64, chunk.sequence.sample_index, chunk.stop) for chunk in draws],
            np.uint64,
        )
        .reshape(-1, 3)
        .view(np.int64),
        "mask_rows": _places([chunk.sequence.constraint is not None for chunk in draws]),
        "bias_rows": _places([_has_bias(chunk) for chunk in draws]),
        "penalty_rows": _places([has_penalty(sampling) for sampling in params]),
    }


def padding_arrays(num_draws: int) -> dict[str, npt.NDArray[Any]]:
    """Give numbers of draws that take the likeliest token. Pure."""
    return {
        "numbers": np.tile(np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]), (num_draws, 1)),
        "top_k": np.zeros(num_draws, np.int32),
        "keys": np.zeros((num_draws, 3), np.int64),
        **{name: np.full(num_draws, -1, np.int32) for name in ("mask_rows", "bias_rows", "penalty_rows")},
    }


def _numbers(sampling: SamplingParams) -> tuple[float, float, float, float, float, float]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def _has_bias(chunk: Chunk) -> bool:
    """Tell whether logits are shifted, or ends banned, in a row drawn after the chunk."""
    sequence = chunk.sequence
    is_early = chunk.stop - sequence.num_prompt_tokens < sequence.sampling.min_tokens
    return bool(sequence.sampling.logit_bias) or (is_early and sequence.constraint is None)


def _places(needs: Seq[bool]) -> npt.NDArray[np.int32]:
    """Number those that need a row of a table; -1 for the others. Pure."""
    numbers = count()
    return np.array([next(numbers) if need else -1 for need in needs], np.int32)


@dataclass(frozen=True, slots=True)
class WantedLogprob:
    """A token whose logprob is wanted.

    Attributes:
        key: the chunk, the token's position, and whether it is one that a constraint may put in the drawn one's place.
        row: of the logits.
        token_id: the token; None = the one drawn.
        draw: which draw it comes from, -1 for known tokens.
        num_top: alternatives to report.
        named_ids: more tokens to report.
    """

    key: tuple[int, int, bool]
    row: int
    token_id: int | None
    num_top: int
    draw: int = -1
    named_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LateArrays:
    """What is filled when the step before is known.

    Attributes:
        arrays: by name, as SampleInputs names the tables; and of the wanted logprobs and measured masks.
        logprobs: in the order of their arrays.
        measured: draws whose masked probability is measured.
    """

    arrays: dict[str, npt.NDArray[Any]]
    logprobs: tuple[WantedLogprob, ...]
    measured: tuple[int, ...]


def late_arrays(
    draws: Seq[Chunk],
    rows: Seq[SampleRow | None],
    draw_rows: Seq[int],
    logprobs: Seq[WantedLogprob],
    *,
    num_token_ids: int,
) -> LateArrays:
    """Fill the tables of the rows to draw.

    Args:
        rows: per draw what to sample by; None where the draw does not count any more.
        draw_rows: per draw its row of logits.
    """
    num_words = -(-num_token_ids // MASK_WORD_BITS)
    masked = [index for index, chunk in enumerate(draws) if chunk.sequence.constraint is not None]
    biased = [index for index, chunk in enumerate(draws) if _has_bias(chunk)]
    penalized = [index for index, chunk in enumerate(draws) if has_penalty(chunk.sequence.sampling)]
    mask = np.zeros((len(masked), num_words), np.int32)
    bias = np.zeros((len(biased), num_token_ids), np.float32)
    counts = np.zeros((len(penalized), num_token_ids), np.int32)
    bits = np.zeros((len(penalized), num_words), np.int32)
    measured = []
    for place, index in enumerate(masked):
        row = rows[index]
        if row is not None and row.mask is not None and row.error is None:
            mask[place] = row.mask
            if is_measured(row.sequence):
                measured.append((index, place))
    for place, index in enumerate(biased):
        if rows[index] is not None:
            _fill_bias(bias[place], draws[index].sequence)
    for place, index in enumerate(penalized):
        if rows[index] is not None:
            _count_tokens(counts[place], bits[place], draws[index].sequence)
    num_named = max((len(wanted.named_ids) for wanted in logprobs), default=0)
    named = np.zeros((len(logprobs), num_named), np.int64)
    for at, wanted in enumerate(logprobs):
        named[at, : len(wanted.named_ids)] = wanted.named_ids
    arrays: dict[str, npt.NDArray[Any]] = {
        "logprob_rows": np.array([wanted.row for wanted in logprobs], np.int64),
        "logprob_ids": np.array([wanted.token_id or 0 for wanted in logprobs], np.int64),
        "logprob_draws": np.array([wanted.draw for wanted in logprobs], np.int64),
        "logprob_named": named,
        "measured_rows": np.array([draw_rows[index] for index, _ in measured], np.int64),
        "measured_masks": np.array([place for _, place in measured], np.int64),
        "mask": mask,
        "prompt_bits": bits,
        "output_counts": counts,
        "bias": bias,
    }
    return LateArrays(arrays, tuple(logprobs), tuple(index for index, _ in measured))


def _fill_bias(bias: npt.NDArray[np.float32], sequence: Sequence) -> None:
    for token_id, value in sequence.sampling.logit_bias.items():
        bias[token_id] += value
    if sequence.constraint is None:
        bias[list(banned_ids(sequence, len(bias)))] = -np.inf


def _count_tokens(counts: npt.NDArray[np.int32], bits: npt.NDArray[np.int32], sequence: Sequence) -> None:
    """Count output tokens, and mark those of the prompt; ids beyond the tables are never drawn."""
    num_ids = len(counts)
    token_ids = np.frombuffer(sequence.token_ids, np.int32)
    prompt, output = np.split(token_ids, [sequence.num_prompt_tokens])
    np.add.at(counts, output[output < num_ids], 1)
    seen = np.zeros(len(bits) * MASK_WORD_BITS, np.bool_)
    seen[prompt[prompt < num_ids]] = True
    bits[:] = np.packbits(seen, bitorder="little").view(np.int32)
