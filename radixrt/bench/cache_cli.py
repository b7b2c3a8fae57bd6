"""`radixrt bench cache`: compare the arms on a workload, or time single operations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from radixrt.bench.machines import DEFAULT_MACHINE, MACHINES, Machine
from radixrt.bench.recorded import read_workload
from radixrt.bench.workloads import GENERATED, Workload
from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, suggest

DEFAULT_WORKLOAD = "few_shot"


def bench_cache(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="recorded requests: a file of JSON lines (timestamp, input_length, output_length, hash_ids; or agent "
            "logs; or questions and answers), or a folder of such files"
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help=f"generated requests: {', '.join(GENERATED)} [{DEFAULT_WORKLOAD}]")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="the first requests only")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="run this arm only; repeatable")] = None,
    machine: Annotated[
        str, typer.Option(help=f"step times: {', '.join(MACHINES)}; the next three change one each")
    ] = DEFAULT_MACHINE,
    fixed_ms: Annotated[float | None, typer.Option(min=0, help="milliseconds per step")] = None,
    per_token_us: Annotated[float | None, typer.Option(min=0, help="microseconds per new token")] = None,
    per_pair_ns: Annotated[float | None, typer.Option(min=0, help="nanoseconds per attention pair")] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV slots; default: the workload's, else the machine's")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=1024, help="token positions per page")] = 16,
    max_running: Annotated[int | None, typer.Option(help="most sequences in one step [64]")] = None,
    max_step_tokens: Annotated[int | None, typer.Option(help="most new tokens in one step [2048]")] = None,
    max_skips: Annotated[int | None, typer.Option(help="bound of the fair orders [64]")] = None,
    micro: Annotated[bool, typer.Option("--micro", help="time single operations instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Simulate a workload under every order and kind of cache; hit rates, times and the offline optimum."""
    from radixrt.bench.cache import (
        ARMS,
        CacheBench,
        cache_report,
        compare,
    )  # keeps other commands quick to start
    from radixrt.bench.micro import measure_micro, micro_report

    if micro:
        timed = measure_micro()
        typer.echo(json.dumps({"micro": timed}) if as_json else micro_report(timed))
        return
    bench = CacheBench(
        choose_workload(trace, workload, limit),
        machine=_machine(machine, fixed_ms=fixed_ms, per_token_us=per_token_us, per_pair_ns=per_pair_ns),
        pool_tokens=pool_tokens,
        page_size=page_size,
        sched=EngineConfig.from_options(
            _given(max_running=max_running, max_step_tokens=max_step_tokens, max_skips=max_skips)
        ).sched,
    )
    measured = compare(bench, arm or ARMS)
    typer.echo(json.dumps(measured) if as_json else cache_report(measured))


def choose_workload(trace: Path | None, name: str | None, limit: int | None) -> Workload:
    """Give the recorded or the generated workload.

    Raises:
        InvalidRequest: both are named, the name is unknown, or the trace cannot be read.
    """
    if trace is not None:
        if name is not None:
            raise InvalidRequest("give trace or workload, not both", parameter="workload", value=name)
        return read_workload(trace, max_requests=limit)
    workload: Workload = _known("workload", name or DEFAULT_WORKLOAD, GENERATED)()
    return workload if limit is None else workload.first(limit)


def _machine(
    name: str, *, fixed_ms: float | None, per_token_us: float | None, per_pair_ns: float | None
) -> Machine:
    """Give a known machine with other constants where they are given."""
    known: Machine = _known("machine", name, MACHINES)
    return dataclasses.replace(
        known,
        **_given(
            fixed_s=None if fixed_ms is None else fixed_ms / 1e3,
            per_token_s=None if per_token_us is None else per_token_us / 1e6,
            per_pair_s=None if per_pair_ns is None else per_pair_ns / 1e9,
        ),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _known(parameter: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise InvalidRequest(
            f"{parameter} must be one of {', '.join(choices)}, got {name!r}.{suggest(name, choices)}",
            parameter=parameter,
            value=name,
        )
    return choices[name]
