"""Many small arrays in one int32 buffer, so that a step needs one copy to the device.

    words   [array 0 ........][..][array 1 ...][..][array 2 .............]
                              ^ each array starts at a multiple of 16 bytes

16 bytes align int64 and float64 arrays, and Triton compiles a kernel anew for pointers that are aligned less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

WORD_BYTES = 4
ALIGNED_WORDS = 4
INT32, INT64, FLOAT32, FLOAT64 = (np.dtype(name) for name in ("int32", "int64", "float32", "float64"))
TORCH_DTYPES = {INT32: torch.int32, INT64: torch.int64, FLOAT32: torch.float32, FLOAT64: torch.float64}

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """One array's place.

    Attributes:
        dtype: a key of TORCH_DTYPES.
        start: its first word; a multiple of ALIGNED_WORDS.
        num_words: words of its elements, without the gap after them.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    num_words: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where arrays lie in a buffer. Invariants: fields follow one another; starts are aligned.

    Attributes:
        num_words: size of the buffer.
    """

    fields: tuple[Field, ...]
    num_words: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> PackedLayout:
        """Place arrays of these types and shapes one after the other. Pure."""
        fields, start = list[Field](), 0
        for name, (dtype, shape) in shapes.items():
            num_words = math.prod(shape) * dtype.itemsize // WORD_BYTES
            fields.append(Field(name, dtype, shape, start, num_words))
            start += -(-num_words // ALIGNED_WORDS) * ALIGNED_WORDS
        return cls(tuple(fields), start)

    @classmethod
    def fitting(cls, arrays: Arrays) -> PackedLayout:
        """Place exactly these arrays. Pure."""
        return cls.of({name: (array.dtype, array.shape) for name, array in arrays.items()})

    def takes(self, arrays: Arrays) -> bool:
        """Tell whether every array has a place that is large enough. Pure."""
        return all(
            array.size * array.itemsize <= field.num_words * WORD_BYTES
            for field, array in zip(self.fields, arrays.values(), strict=True)
        )

    def write(self, buffer: npt.NDArray[np.int32], arrays: Arrays) -> int:
        """Write arrays, in the fields' order; a smaller one is followed by zeros, the last one by nothing.

        Returns: how many words of the buffer count.
        Changes: buffer.
        """
        stop = 0
        for field, (name, array) in zip(self.fields, arrays.items(), strict=True):
            assert name == field.name
            assert array.dtype == field.dtype
            words = np.ascontiguousarray(array).reshape(-1).view(np.int32)
            buffer[stop : field.start] = 0  # what the array before did not fill, and the gap
            stop = field.start + len(words)
            buffer[field.start : stop] = words
        return stop

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give the arrays in a buffer: no copies."""
        return {
            field.name: buffer[field.start : field.start + field.num_words]
            .view(TORCH_DTYPES[field.dtype])
            .view(field.shape)
            for field in self.fields
        }
