"""A device without a GPU: it records what is captured and replays the recorded calls on CPU tensors.

As with a CUDA graph, what a captured call reads on the host is frozen: only tensors change between replays.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import torch
from radixrt_kernels import reference, reference_sampling
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from radixrt.exec.device import Graph
from radixrt.model.device_kernels import Kernels


class FakeEvent:
    """Notes that somebody waited."""

    def __init__(self, log):
        self._log, self.number = log, len(log)
        log.append("record")

    def synchronize(self):
        self._log.append(("wait", self.number))


class _Recorder(TorchDispatchMode):
    """Takes down every operation of torch, with the tensors it read and wrote."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class FakeDevice:
    """The CPU as a device. `kernels` must be used by what is captured.

    Attributes:
        log: events recorded and waited for, in order.
        num_captures, num_replays: graphs.
    """

    def __init__(self):
        self.log = []
        self.num_captures = self.num_replays = 0
        self._recorder = None

    @property
    def torch_device(self):
        return torch.device("cpu")

    def host_buffer(self, num_bytes):
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def record(self):
        return FakeEvent(self.log)

    def graph_bytes(self):
        return 0

    def kernels(self, kernels: Kernels) -> Kernels:
        """Give the same kernels, each a single call to the recorder."""
        return replace(
            kernels, **{item.name: self._whole(getattr(kernels, item.name)) for item in fields(kernels)}
        )

    def _whole(self, kernel):
        def call(*args, **kwargs):
            if self._recorder is None:
                return kernel(*args, **kwargs)
            with _disable_current_modes():
                out = kernel(*args, **kwargs)
            self._recorder.calls.append((kernel, args, kwargs, out))
            return out

        return call

    def capture(self, launch):
        self.num_captures += 1
        launch()
        self._recorder = recorder = _Recorder()
        try:
            with recorder:
                output = launch()
        finally:
            self._recorder = None

        def replay():
            self.num_replays += 1
            output.fill_(float("nan"))
            for func, args, kwargs, out in recorder.calls:
                _put(out, func(*args, **kwargs))

        return Graph(replay, output)


def _put(recorded, computed):
    """Write a call's result to where it was when it was recorded."""

    def put(to, result):
        if isinstance(to, torch.Tensor) and to.data_ptr() != result.data_ptr():
            to.copy_(result)

    if isinstance(recorded, (tuple, list)):
        for pair in zip(recorded, computed, strict=True):
            put(*pair)
    else:
        put(recorded, computed)


# -- kernels in torch: fast enough for whole engines ----------------------------------------------------


def attend(q, kv_layer, plan, *, scale, soft_cap=None):
    """Carry out work items one by one. Rows that no item names hold NaN, as memory does that nobody wrote."""
    assert soft_cap is None
    out, table = torch.full_like(q, float("nan")), plan.page_table.flatten()
    if plan.decode is not None:
        _attend_items(q, kv_layer, table, plan.decode, scale, out)
    if plan.extend is not None:
        for first, q_start, num_new, context, first_row in plan.extend.tiles.tolist():
            if num_new and first_row == 0:  # the sequence's first tile: do all of it
                keys, values = _context(kv_layer, table, first, context, q)
                positions = torch.arange(context - num_new, context)[:, None]
                visible = torch.arange(context)[None] <= positions
                if (window := plan.extend.sliding_window) is not None:
                    visible &= torch.arange(context)[None] > positions - window
                scores = torch.einsum("nhd,chd->hnc", q[q_start : q_start + num_new], keys) * scale
                weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
                out[q_start : q_start + num_new] = torch.einsum("hnc,chd->nhd", weights, values)
    return out


def _context(kv_layer, table, first, num_tokens, q):
    """Give keys and values of num_tokens tokens from an entry of the page table on, [c, H, D] each."""
    num_pages = -(-num_tokens // kv_layer.shape[2])
    pages = kv_layer[table[first : first + num_pages].long()]
    num_group_heads = q.shape[1] // kv_layer.shape[3]
    return (
        pages[:, part].flatten(0, 1)[:num_tokens].repeat_interleave(num_group_heads, 1) for part in (0, 1)
    )


def _attend_items(q, kv_layer, table, plan, scale, out):
    parts, members = {}, plan.members.tolist()
    for first, num_tokens, position, first_member, num_members in plan.items.tolist():
        if not num_tokens:
            continue
        keys, values = _context(kv_layer, table, first, num_tokens, q)
        for row, slot, first_visible in members[first_member : first_member + num_members]:
            visible = torch.arange(position, position + num_tokens) >= first_visible
            scores = torch.einsum("hd,chd->hc", q[row], keys) * scale
            scores = scores.masked_fill(~visible, -torch.inf)
            found = (scores.logsumexp(-1), torch.einsum("hc,chd->hd", scores.softmax(-1), values))
            assert slot < plan.num_slots
            if slot < 0:
                out[row] = found[1]
            else:
                parts[slot] = found
    for row, first, stop in plan.merges.tolist():
        if first < stop:
            sums, results = (
                torch.stack(some) for some in zip(*(parts[i] for i in range(first, stop)), strict=True)
            )
            out[row] = (sums.softmax(0)[:, :, None] * results).sum(0)


def _copy_listed_pages(source, target, pairs):
    target[pairs[:, 1].long()] = source[pairs[:, 0].long()]


TORCH = Kernels(
    rope_write=reference.rope_write,
    attend=attend,
    add_norm=reference.add_norm,
    silu_mul=reference.silu_mul,
    sample=reference_sampling.sample,
    copy_listed_pages=_copy_listed_pages,
)


@contextlib.contextmanager
def device_engine(monkeypatch, folder, *, kernels=TORCH, device=None, **options):
    """Open an engine in float32 whose model runs on a device of this module."""
    from radixrt import Engine
    from radixrt.exec.device_runner import DeviceRunner
    from radixrt.model.device_decoder import DeviceDecoder
    from radixrt.model.spec import ModelSpec
    from radixrt.model.weights import read_weights

    device = device or FakeDevice()

    def load(config):
        spec = ModelSpec.load(config.folder)
        weights = read_weights(config.folder, spec, device=device.torch_device, dtype=config.dtype)
        return DeviceDecoder(spec, weights, max_context=config.max_context, kernels=device.kernels(kernels))

    def make_runner(model, store, config):
        return DeviceRunner(
            model,
            store,
            device,
            num_token_ids=config.num_token_ids,
            max_rows=config.options.sched.max_running,
            max_context=config.max_context,
        )

    defaults = {"dtype": "float32", "checks": "step", "num_pages": 200, "page_size": 4, "max_running": 8}
    with monkeypatch.context() as patch:
        patch.setattr("radixrt.engine._load", load)
        patch.setattr("radixrt.engine.make_runner", make_runner)
        engine = Engine(folder, **{**defaults, **options})
    with engine:
        yield engine
