"""The GPU runner by itself: decode and prefill of a Llama-3-8B shape with random weights, and the host's time per step.

Without a card, a device that does nothing takes its place: what remains is the host's part of a step.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from radixrt.bench.gpu_cases import COPY_BYTES_PER_S, DTYPE, ITEM_BYTES, LLAMA_3_8B, MATRIX_FLOPS_PER_S
from radixrt.config import SchedConfig
from radixrt.errors import InvariantViolation
from radixrt.exec.device import CudaDevice, Device, Event, Graph
from radixrt.exec.device_runner import DeviceRunner, DeviceStep
from radixrt.kv.cache import PrefixCache
from radixrt.kv.store import KVStore
from radixrt.model.decoder import DecoderWeights, LayerWeights, Linear
from radixrt.model.device_decoder import DeviceDecoder
from radixrt.model.device_kernels import TRITON, Kernels, Sampled
from radixrt.model.spec import ModelSpec, RopeSpec
from radixrt.sched.plan import StepPlan
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import Sequence
from radixrt.types import GenerateRequest, SamplingParams

Clock = Callable[[], float]
PAGE_SIZE = 16
MAX_STEP_TOKENS = 8192
MAX_CONTEXT = 8192
NUM_STEPS = 64
HOST_PARTS = ("plan", "launch", "collect", "commit", "settle", "sample")


@dataclass(frozen=True, slots=True)
class RunnerCase:
    """`batch` sequences of `context` prompt tokens, the first num_shared_tokens of them common to all."""

    batch: int
    context: int
    num_shared_tokens: int = 0

    @property
    def name(self) -> str:
        shared = f", {self.num_shared_tokens} shared" if self.num_shared_tokens else ""
        return f"decode {self.batch} x {self.context}{shared}"

    @property
    def floor_s(self) -> float:
        """The weights and each distinct key and value once, at copy bandwidth."""
        shape = LLAMA_3_8B
        num_tokens = self.num_shared_tokens + self.batch * (self.context - self.num_shared_tokens)
        num_bytes = num_weight_bytes(llama_spec()) + num_tokens * shape.num_layers * shape.kv_token_bytes
        return num_bytes / COPY_BYTES_PER_S

    @property
    def prefill_floor_s(self) -> float:
        """Two operations per weight and new token (attention apart), at the matrix rate."""
        num_new = self.num_shared_tokens + self.batch * (self.context - self.num_shared_tokens)
        return num_new * num_weight_bytes(llama_spec()) / ITEM_BYTES * 2 / MATRIX_FLOPS_PER_S


CASES = (
    RunnerCase(1, 128),
    RunnerCase(1, 2048),
    RunnerCase(8, 2048),
    RunnerCase(64, 2048),
    RunnerCase(64, 4352, num_shared_tokens=4096),
)


def llama_spec() -> ModelSpec:
    """Give the shape of Llama-3-8B. Pure."""
    shape = LLAMA_3_8B
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_context=MAX_CONTEXT,
        norm_epsilon=1e-5,
        rope=RopeSpec(tuple((500_000.0**-steps).tolist())),
        sliding_windows=(None,) * shape.num_layers,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        has_tied_head=False,
    )


def num_weight_bytes(spec: ModelSpec) -> int:
    """Give the bytes of the matrices that a step reads: the head, not the embedding. Pure."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    return ITEM_BYTES * (spec.num_layers * layer + spec.hidden_size * spec.vocab_size)


def random_weights(spec: ModelSpec, device: torch.device) -> DecoderWeights:
    """Give weights small enough that activations stay finite."""

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=DTYPE, device=device).normal_(0, columns**-0.5)

    ones = torch.ones(spec.hidden_size, dtype=DTYPE, device=device)
    num_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layers = [
        LayerWeights(
            attention_norm=ones,
            qkv=Linear(draw(num_rows, spec.hidden_size)),
            qk_norm=None,
            output=Linear(draw(spec.hidden_size, spec.num_heads * spec.head_dim)),
            mlp_norm=ones,
            gate_up=Linear(draw(2 * spec.intermediate_size, spec.hidden_size)),
            down=Linear(draw(spec.hidden_size, spec.intermediate_size)),
        )
        for _ in range(spec.num_layers)
    ]
    embedding, head = (draw(spec.vocab_size, spec.hidden_size) for _ in range(2))
    return DecoderWeights(embedding, tuple(layers), ones, head)


class Timer:
    """Own the seconds that parts of the steps took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = self._clock()
        yield
        self.seconds[name].append(self._clock() - started)

    def median_us(self, name: str) -> float:
        return 1e6 * statistics.median(self.seconds[name])


class Drive:
    """Own a scheduler and carry out its steps in the loop's order, without readers; every part is timed."""

    def __init__(
        self, runner: DeviceRunner, num_pages: int, *, max_running: int, clock: Clock = time.perf_counter
    ) -> None:
        self.runner = runner
        self.timer = Timer(clock)
        cache = PrefixCache(num_pages, page_size=PAGE_SIZE)
        config = SchedConfig(max_step_tokens=MAX_STEP_TOKENS, max_running=max_running)
        self.scheduler = Scheduler(cache, config)
        self._launched: tuple[StepPlan, DeviceStep] | None = None

    def add(self, case: RunnerCase, *, max_tokens: int) -> None:
        """Let a case's sequences wait."""
        generator = torch.Generator().manual_seed(0)
        draws = torch.randint(self.runner.num_token_ids, (case.batch, case.context), generator=generator)
        draws[:, : case.num_shared_tokens] = draws[0, : case.num_shared_tokens]
        for index, prompt in enumerate(draws):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            request = GenerateRequest(tuple(prompt.tolist()), sampling)
            self.scheduler.add(Sequence(request, arrival=index, seed=index), 0.0)

    def step(self, *, overlap: bool = True) -> StepPlan:
        """Run one step as EngineLoop does; give its plan."""
        timer, scheduler, before = self.timer, self.scheduler, self._launched
        with timer.part("step"):
            with timer.part("plan"):
                plan = scheduler.plan(0.0)
            with timer.part("launch"):
                step = self.runner.launch(plan) if plan.chunks else None
            if before is not None:
                self._complete(*before)
                with timer.part("settle"):
                    plan = scheduler.settle(plan)
            if step is not None:
                with timer.part("sample"):
                    self.runner.sample(step, plan)
            self._launched = (plan, step) if step is not None else None
            if not overlap and self._launched is not None:
                self._complete(*self._launched)
                self._launched = None
        return plan

    def _complete(self, plan: StepPlan, step: DeviceStep) -> None:
        with self.timer.part("collect"):
            result = self.runner.collect(step)
        with self.timer.part("commit"):
            self.scheduler.commit(plan, result)

    def run(self, case: RunnerCase, *, num_steps: int, overlap: bool = True) -> dict[str, float]:
        """Prefill a case, then decode it; give the medians of a decode step's parts and the prefill, in us."""
        started = time.perf_counter()
        # The first sequences decode while the last ones are prefilled.
        num_prefill_steps = 1 + case.batch * case.context // MAX_STEP_TOKENS
        self.add(case, max_tokens=num_steps + 2 * num_prefill_steps + 8)
        while self.step(overlap=overlap).num_tokens != case.batch or len(self.scheduler.running) < case.batch:
            pass
        prefill_s = time.perf_counter() - started
        self.timer.seconds.clear()
        for _ in range(num_steps):
            if (num_tokens := self.step(overlap=overlap).num_tokens) != case.batch:
                raise InvariantViolation(f"a decode step of {case.batch} sequences had {num_tokens} tokens")
        found = {
            name: self.timer.median_us(name) for name in ("step", *HOST_PARTS) if self.timer.seconds[name]
        }
        while self._launched is not None or not self.scheduler.is_idle:
            self.step(overlap=overlap)
        self.scheduler.cache.clear()  # the next run computes its prompts anew
        return {**found, "prefill": 1e6 * prefill_s}


# -- the host alone -------------------------------------------------------------------------------------


class _Done:
    def synchronize(self) -> None:
        """Nothing is under way."""


class HostOnly:
    """A device that does nothing: calls are made once where a graph would hold them."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self) -> Event:
        return _Done()

    def capture(self, launch: Callable[[], torch.Tensor]) -> Graph:
        return Graph(lambda: None, launch())

    def graph_bytes(self) -> int:
        return 0


def _draw_zeros(logits: torch.Tensor, *_: Any, **__: Any) -> Sampled:
    zeros = torch.zeros(len(logits))
    return Sampled(zeros.long(), zeros, zeros)


NOTHING = Kernels(
    rope_write=lambda qkv, kv_layer, **_: qkv[:, : qkv.shape[1] - 2 * kv_layer.shape[3]],
    attend=lambda q, *_, **__: q.contiguous(),
    add_norm=lambda x, *_, **__: x,
    silu_mul=lambda gate_up: gate_up[:, : gate_up.shape[1] // 2].contiguous(),
    sample=_draw_zeros,
    copy_listed_pages=lambda *_: None,
)


def host_times(case: RunnerCase, *, num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Give the host's medians per decode step of a case on a device that does nothing: us of this CPU's time."""
    spec = replace(llama_spec(), hidden_size=64, intermediate_size=64, sliding_windows=(None,))
    drive = make_drive(spec, HostOnly(), [case], kernels=NOTHING, clock=time.thread_time)
    found = drive.run(case, num_steps=num_steps)
    return {name: found[name] for name in (*HOST_PARTS, "step")}


def dry_run(say: Callable[[str], None]) -> dict[str, Any]:
    """Time the host's part of each case's decode step."""
    say(
        "the host's part of a decode step, us of this CPU (with overlap it is hidden while it is shorter than the step)"
    )
    say(
        f"{'case':34}" + "".join(f"{name:>9}" for name in (*HOST_PARTS, "all")) + f"{'floor of the card':>20}"
    )
    found = {}
    for case in CASES:
        found[case.name] = times = host_times(case)
        say(
            f"{case.name:34}"
            + "".join(f"{times[name]:9.0f}" for name in (*HOST_PARTS, "step"))
            + f"{1e6 * case.floor_s:20.0f}"
        )
    return found


def run(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Capture the graphs and time prefill and decode, with overlap and without."""
    torch.manual_seed(0)
    started = time.perf_counter()
    cuda = CudaDevice(device)
    with torch.inference_mode():
        drive = make_drive(llama_spec(), cuda, CASES)
    ready_s = time.perf_counter() - started
    num_mib = cuda.graph_bytes() / 2**20
    say(f"runner: weights drawn and graphs captured in {ready_s:.1f} s; graphs keep {num_mib:.0f} MiB")
    return {"graph_bytes": cuda.graph_bytes(), "ready_s": ready_s, "cases": time_cases(drive, CASES, say)}


def time_cases(drive: Drive, cases: Seq[RunnerCase], say: Callable[[str], None]) -> dict[str, Any]:
    """Time prefill and decode of each case, with overlap and without; the table is said."""
    columns = ("us", "no overlap", "floor", "of floor", "prefill us", "of floor")
    say(f"{'case':34}" + "".join(f"{column:>12}" for column in columns))
    found = {}
    for case in cases:
        on, off = (drive.run(case, num_steps=NUM_STEPS, overlap=overlap) for overlap in (True, False))
        floor_us, prefill_floor_us = 1e6 * case.floor_s, 1e6 * case.prefill_floor_s
        found[case.name] = {
            "us": on["step"],
            "no_overlap_us": off["step"],
            "floor_us": floor_us,
            "prefill_us": on["prefill"],
            "prefill_floor_us": prefill_floor_us,
            "host_us": {name: on[name] for name in HOST_PARTS},
        }
        say(
            f"{case.name:34}{on['step']:12.0f}{off['step']:12.0f}{floor_us:12.0f}{floor_us / on['step']:12.0%}"
            f"{on['prefill']:12.0f}{prefill_floor_us / on['prefill']:12.0%}"
        )
    return found


def make_drive(
    spec: ModelSpec,
    device: Device,
    cases: Seq[RunnerCase],
    *,
    kernels: Kernels = TRITON,
    clock: Clock = time.perf_counter,
) -> Drive:
    """Give a drive that can run these cases, one after another."""
    max_rows = max(case.batch for case in cases)
    num_pages = 64 + max(case.batch * -(-(case.context + NUM_STEPS + 128) // PAGE_SIZE) for case in cases)
    weights = random_weights(spec, device.torch_device)
    model = DeviceDecoder(spec, weights, max_context=MAX_CONTEXT, kernels=kernels)
    layout = spec.kv_layout(page_size=PAGE_SIZE, dtype=DTYPE)
    store = KVStore(layout, num_pages=num_pages, device=device.torch_device)
    runner = DeviceRunner(
        model, store, device, num_token_ids=spec.vocab_size, max_rows=max_rows, max_context=MAX_CONTEXT
    )
    return Drive(runner, num_pages, max_running=max_rows, clock=clock)
