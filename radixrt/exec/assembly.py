"""A loaded model -> the runner that carries out its plans."""

from __future__ import annotations

from typing import Any

from radixrt.config import SchedConfig
from radixrt.errors import InvalidRequest
from radixrt.exec.draw import draw_rows
from radixrt.exec.native_draw import NativeDraw
from radixrt.exec.resolve import ResolvedConfig
from radixrt.exec.runner import ModelRunner, Runner
from radixrt.kv.store import KVStore
from radixrt.model.decoder import Decoder
from radixrt.model.loader import AnyDecoder
from radixrt.model.native import NativeDecoder


def make_runner(model: AnyDecoder, store: KVStore, config: ResolvedConfig) -> Runner[Any]:
    """Give the device runner for a model on Triton's kernels, capturing its graphs; else the plain one."""
    if isinstance(model, Decoder | NativeDecoder):
        draw = NativeDraw(model.native) if isinstance(model, NativeDecoder) else draw_rows
        return ModelRunner(model, store, num_token_ids=config.num_token_ids, draw=draw)
    # These need the optional package triton, as the model did.
    from radixrt.exec.device import CudaDevice
    from radixrt.exec.device_runner import DeviceRunner

    return DeviceRunner(
        model,
        store,
        CudaDevice(config.device),
        num_token_ids=config.num_token_ids,
        max_rows=config.options.sched.max_running,
        max_context=config.max_context,
    )


def resolve_overlap(config: SchedConfig, runner: Runner[Any]) -> bool:
    """Choose whether steps overlap: where the runner can.

    Raises:
        InvalidRequest: it was asked for and the runner cannot.
    """
    if config.overlap == "on" and not runner.can_overlap:
        raise InvalidRequest(
            "overlap must be auto or off here: this model's steps run on the host, one after another",
            parameter="overlap",
            value="on",
        )
    return runner.can_overlap and config.overlap != "off"
