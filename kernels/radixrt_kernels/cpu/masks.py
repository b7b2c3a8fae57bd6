"""Masks of a step, which the library asks for when it needs them: they can be filled beside its layers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE

import numpy as np

WORD_BITS = 32
GET_MASKS = CFUNCTYPE(None)

Mask = np.ndarray[tuple[int], np.dtype[np.int32]]
GetMasks = Callable[[], Sequence[Mask | None]]


class MaskCall:
    """One step's call from the library back to `get_masks`. To be kept until the step is over.

    Attributes:
        address: where the library finds the address of the masks' addresses once they are there, until then 0.
    """

    def __init__(self, get_masks: GetMasks | None, *, num_rows: int, num_token_ids: int) -> None:
        self._get_masks = get_masks
        self._num_token_ids = num_token_ids
        self._masks: tuple[Mask | None, ...] = ()
        self._addresses = array("q", bytes(8 * num_rows))
        self._found = array("q", (0,))
        self._error: BaseException | None = None
        self.address = self._found.buffer_info()[0]

    def function(self) -> GET_MASKS:  # type: ignore[valid-type]  # ctypes makes the type
        """Give what the library is to call; null where there are no masks."""
        if self._get_masks is None or not self._addresses:
            return GET_MASKS()
        return GET_MASKS(self._call)

    def raise_error(self) -> None:
        """Raise what `get_masks` raised, if it did."""
        error, self._error = self._error, None  # whose traceback holds this object
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _call(self) -> None:
        """Find the masks' addresses.

        No exception gets through the library. Where a signal's comes before or after the lines in `try`, nothing is found.
        """
        try:
            assert self._get_masks is not None
            self._masks = tuple(self._get_masks())
            if len(self._masks) != len(self._addresses):
                raise ValueError(f"there must be {len(self._addresses)} masks, got {len(self._masks)}")
            for row, mask in enumerate(self._masks):
                self._addresses[row] = 0 if mask is None else mask_address(mask, self._num_token_ids)
            self._found[0] = self._addresses.buffer_info()[0]
        except BaseException as error:  # noqa: BLE001
            self._error = error


def mask_address(mask: Mask, num_token_ids: int) -> int:
    """Give a mask's address.

    Raises:
        ValueError: it is not [ceil(num_token_ids / 32)] int32, contiguous.
    """
    num_words = -(-num_token_ids // WORD_BITS)
    if mask.dtype != np.int32 or mask.shape != (num_words,) or not mask.flags.c_contiguous:
        raise ValueError(
            f"a mask must be [{num_words}] int32, contiguous, got {list(mask.shape)} {mask.dtype}"
        )
    return mask.ctypes.data
