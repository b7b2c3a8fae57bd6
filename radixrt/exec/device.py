"""Device: what the device runner needs besides kernels. CUDA here; tests have one that records and replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A place in the device's order of work."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Captured work.

    Attributes:
        replay: do it again, on the same memory.
        output: what it leaves; replays write the same tensor.
    """

    replay: Callable[[], None]
    output: torch.Tensor


class Device(Protocol):
    """One device with one order of work: everything is done in the order in which it was asked for."""

    @property
    def torch_device(self) -> torch.device: ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Give [num_bytes] uint8 on the host that the device copies to and from by itself."""
        ...

    def record(self) -> Event:
        """Mark the present end of the work."""
        ...

    def capture(self, launch: Callable[[], torch.Tensor]) -> Graph:
        """Capture the work that a call asks for. The call is made several times; nothing it reads on the host counts
        later, and all memory it allocates stays the graph's."""
        ...

    def graph_bytes(self) -> int:
        """Give the memory that captured graphs keep, apart from what they were given."""
        ...


class CudaDevice:
    """The current stream of one CUDA device. All graphs share one pool of memory: they run one after another.

    Args:
        device: with an index, or the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph_bytes = 0

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def capture(self, launch: Callable[[], torch.Tensor]) -> Graph:
        # Kernels are compiled and libraries make their workspaces at a first call, which a capture cannot hold.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture begins with it: only what the graph keeps is counted
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = launch()
        self._graph_bytes += torch.cuda.memory_reserved(self._device) - before
        return Graph(graph.replay, output)

    def graph_bytes(self) -> int:
        return self._graph_bytes
