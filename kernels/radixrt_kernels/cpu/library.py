"""The compiled library's C interface (src/api.cpp), typed."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from array import array
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch

from radixrt_kernels.cpu.build import BuildError, build, choose_variants
from radixrt_kernels.cpu.masks import GET_MASKS

LOGGER = logging.getLogger(__name__)
STATUS_TEXTS = {
    2: "token_ids must be in [0, vocab_size)",
    3: "slots must lie in the KV store",
    4: "page_table must name pages of the KV store",
    5: "sample_rows must be rows of the step",
    6: "every sequence must have 1 <= new tokens <= context <= P * page_size",
}
OUT_OF_MEMORY, NO_MASKS = 1, 9
REFUSAL_TEXTS = {
    7: "the CPU has no matrix unit with tiles of 16 rows of 64 bytes, though it says so",
    8: "the matrix unit computes wrong products on this CPU",
}


class CShape(Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "num_layers",
            )
        ),
        ("norm_epsilon", c_double),
        ("rope_magnitude", c_double),
        ("inverse_frequencies", c_void_p),
    )


class CLayer(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "attention_norm",
                "qkv",
                "qkv_bias",
                "qk_norm",
                "output",
                "output_bias",
                "mlp_norm",
                "gate_up",
                "gate_up_bias",
                "down",
                "down_bias",
            )
        ),
        ("window", c_int64),
    )


class CWeights(Structure):
    _fields_ = (
        ("embedding", c_void_p),
        ("head", c_void_p),
        ("rough_head", c_void_p),
        ("rough_bounds", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(CLayer)),
    )


class CBatch(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("num_columns", c_int64),
        ("page_table", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
    )


class CInputs(Structure):
    _fields_ = (
        ("batch", CBatch),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_sampled", c_int64),
        ("sample_rows", c_void_p),
        ("num_token_ids", c_int64),
        ("get_masks", GET_MASKS),
        ("masks", c_void_p),
    )


class COutputs(Structure):
    _fields_ = (("logits", c_void_p), ("token_ids", c_void_p), ("largest", c_void_p))


class CStore(Structure):
    _fields_ = (("data", c_void_p), ("num_pages", c_int64), ("page_size", c_int64))


SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "rt_has_tiles": (c_int32, ()),
    "rt_prepare": (c_int32, ()),
    "rt_packed_words": (c_int64, (c_int64, c_int64, c_int32, c_int32, c_int32)),
    "rt_pack": (None, (c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32, c_void_p)),
    "rt_rough_size": (None, (c_int64, c_int64, POINTER(c_int64), POINTER(c_int64))),
    "rt_pack_rough": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p)),
    "rt_team_create": (c_void_p, (c_int32,)),
    "rt_team_destroy": (None, (c_void_p,)),
    "rt_attend": (
        c_int32,
        (
            *(c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64, POINTER(CBatch), c_void_p),
            *(c_void_p, c_int64, c_int64, c_int64, c_int64, c_float, c_int32),
        ),
    ),
    "rt_model_create": (c_void_p, (POINTER(CShape), POINTER(CWeights), c_int32, c_int32)),
    "rt_model_destroy": (None, (c_void_p,)),
    "rt_model_step": (
        c_int32,
        (c_void_p, POINTER(CShape), POINTER(CInputs), POINTER(CStore), POINTER(COutputs)),
    ),
    "rt_model_draw": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "rt_read": (c_uint64, (c_void_p, c_int64)),
}


class Library:
    """A loaded library of one variant. Immutable; holds no state of any model.

    Attributes:
        refusals: why variants that would be faster on this CPU are not used.
    """

    def __init__(self, path: Path, variant: str, *, refusals: tuple[str, ...] = ()) -> None:
        """Load, and try what must be tried on the CPU at hand.

        Raises:
            BuildError: the file is broken, the system refuses the instructions, or they compute something else.
        """
        self.variant = variant
        self.refusals = refusals
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(
                f"{path} cannot be loaded: {error}; remove it to have it compiled anew"
            ) from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        self._prepare()

    def _prepare(self) -> None:
        status = self.functions.rt_prepare()
        if status < 0:
            # Linux means the stacks that threads gave to sigaltstack: they must hold the tiles as well.
            is_stack = status == -errno.ENOSPC
            reason = "an alternate signal stack is too small" if is_stack else os.strerror(-status)
            raise BuildError(f"the system does not let this process use the matrix unit: {reason}")
        if status in REFUSAL_TEXTS:
            raise BuildError(REFUSAL_TEXTS[status])
        check_status(status)

    def packed_words(self, weight: torch.Tensor, *, is_paired: bool = False, is_layer: bool = True) -> int:
        """Give the 32-bit words that `pack` writes for a weight [outputs, inputs]."""
        kind = (is_bfloat16(weight), is_paired, is_layer)
        words: int = self.functions.rt_packed_words(*weight.shape, *kind)
        return words

    def pack(
        self, weight: torch.Tensor, target: torch.Tensor, *, is_paired: bool = False, is_layer: bool = True
    ) -> None:
        """Write a weight as panels of 32 outputs (layout: src/tile.h).

        Args:
            weight: [outputs, inputs] float32, or bfloat16 with an even number of inputs; contiguous.
            target: [packed_words] int32, contiguous.
            is_paired: the weight stacks two matrices whose outputs are needed side by side.
            is_layer: a matrix of a layer, not the head or the embedding, which keep their type on every CPU.
        Changes: target.
        """
        num_words = self.packed_words(weight, is_paired=is_paired, is_layer=is_layer)
        if weight.shape[1] * weight.dtype.itemsize % 4:
            raise ValueError(f"a bfloat16 weight must have an even number of inputs, got {weight.shape[1]}")
        if target.numel() != num_words:
            raise ValueError(f"target must have {num_words} words")
        self.functions.rt_pack(
            pointer(weight, "weight", weight.dtype, tuple(weight.shape)),
            *weight.shape,
            is_bfloat16(weight),
            is_paired,
            is_layer,
            pointer(target, "target", torch.int32, tuple(target.shape)),
        )

    def rough_sizes(self, weight: torch.Tensor) -> tuple[int, int]:
        """Give the 32-bit words and the bytes of bounds that `pack_rough` writes for a weight [outputs, inputs]; 0, 0 where
        this variant has no rough products, or none with so many inputs.
        """
        num_words, num_bytes = c_int64(), c_int64()
        self.functions.rt_rough_size(*weight.shape, ctypes.byref(num_words), ctypes.byref(num_bytes))
        return num_words.value, num_bytes.value

    def pack_rough(self, weight: torch.Tensor, target: torch.Tensor, bounds: torch.Tensor) -> None:
        """Write a weight in 8 bits, and how far that is from it (src/rough.h).

        Args:
            weight: [outputs, inputs] float32 or bfloat16, contiguous.
            target, bounds: `rough_sizes` of int32 and uint8, contiguous.
        Changes: target, bounds.
        """
        num_words, num_bytes = self.rough_sizes(weight)
        if not num_words:
            raise ValueError(
                f"the variant {self.variant} has no rough products with {weight.shape[1]} inputs"
            )
        self.functions.rt_pack_rough(
            pointer(weight, "weight", weight.dtype, tuple(weight.shape)),
            *weight.shape,
            is_bfloat16(weight),
            pointer(target, "target", torch.int32, (num_words,)),
            pointer(bounds, "bounds", torch.uint8, (num_bytes,)),
        )

    def read_bytes(self, tensor: torch.Tensor) -> None:
        """Read a contiguous tensor once on this thread, for measuring how fast memory is."""
        self.functions.rt_read(tensor.data_ptr(), tensor.nbytes)


def load_library(folder: Path, *, variant: str | None = None) -> Library:
    """Compile if `folder` does not have it yet, and load.

    Args:
        folder: where compiled libraries are kept; made if missing.
        variant: name of a variant (build.VARIANTS); default: the fastest that this CPU can run.
            Where that one cannot be used (an old compiler, a refusal of the system) the next is, and one warning says
            why.
    Raises:
        BuildError: no compiler, a failed compilation, a variant that this CPU cannot run. Of several, the first's.
    """
    errors: list[BuildError] = []
    refusals: list[str] = []
    for chosen in choose_variants(variant):
        try:
            library = Library(build(folder, chosen), chosen.name, refusals=tuple(refusals))
        except BuildError as error:
            errors.append(error)
            refusals.append(f"{chosen.name}: {error}")
            continue
        if refusals:
            LOGGER.warning("CPU kernels %s are used, not %s", chosen.name, "; ".join(refusals))
        return library
    raise errors[0]


def is_bfloat16(tensor: torch.Tensor) -> bool:
    """Tell the library's two types apart.

    Raises:
        ValueError: neither float32 nor bfloat16.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the CPU kernels take float32 and bfloat16, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def pointer(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Give a tensor's address after checking everything that the library takes for granted.

    Raises:
        ValueError: names the tensor, what was expected and what came.
    """
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on the CPU")
    return tensor.data_ptr()


def address(values: array[int], name: str, typecode: str, count: int) -> int:
    """Give an array's address after checking its type and length.

    Raises:
        ValueError: names the array, what was expected and what came.
    """
    if not isinstance(values, array):
        raise ValueError(f"{name} must be an array, got {type(values).__name__}")
    if values.typecode != typecode or len(values) != count:
        raise ValueError(f"{name} must be [{count}] {typecode!r}, got [{len(values)}] {values.typecode!r}")
    return values.buffer_info()[0]


def check_status(status: int) -> None:
    """Raise what a status of the library means, unless it is 0."""
    if status == OUT_OF_MEMORY:
        raise MemoryError("no memory for the rows of this step")
    if status == NO_MASKS:
        raise RuntimeError("the call for masks was cut short; what cut it was told on the error stream")
    if status:
        raise ValueError(STATUS_TEXTS[status])
