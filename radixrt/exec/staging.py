"""Staging: the way of a step's arrays to the device, in one copy."""

from __future__ import annotations

import torch

from radixrt.exec.device import Device
from radixrt.exec.packing import WORD_BYTES, Arrays, PackedLayout

NUM_TURNS = 2  # steps whose copies may be under way at once: one runs, one is being prepared


class Staging:
    """Own one buffer on the device and NUM_TURNS on the host, which take turns.

    A host buffer is written again NUM_TURNS copies later. Whoever calls must have seen the step before the last one
    end by then; the device's buffer needs no such care, since the device works in order.

    Args:
        num_words: size of the buffers; `copy` grows them unless views of the device's buffer are kept.
    """

    def __init__(self, device: Device, *, num_words: int = 0) -> None:
        self._device = device
        self._turn = 0
        self._allocate(num_words)

    def _allocate(self, num_words: int) -> None:
        self._host = [
            self._device.host_buffer(num_words * WORD_BYTES).view(torch.int32) for _ in range(NUM_TURNS)
        ]
        self._arrays = [buffer.numpy() for buffer in self._host]
        self.buffer = torch.zeros(num_words, dtype=torch.int32, device=self._device.torch_device)

    def copy(self, layout: PackedLayout, arrays: Arrays) -> None:
        """Write arrays and begin to copy them. Changes: `buffer`, a new one when it must grow."""
        if layout.num_words > len(self.buffer):
            self._allocate(max(layout.num_words, 2 * len(self.buffer)))
        self._turn = (self._turn + 1) % NUM_TURNS
        num_words = layout.write(self._arrays[self._turn], arrays)
        self.buffer[:num_words].copy_(self._host[self._turn][:num_words], non_blocking=True)

    def send(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Copy arrays and give them as they lie on the device, until the next call."""
        layout = PackedLayout.fitting(arrays)
        self.copy(layout, arrays)
        return layout.views(self.buffer)
