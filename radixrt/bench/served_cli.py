"""`radixrt bench workloads`: whole-engine runs, arm against arm and peer against ours in one run."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from radixrt.bench.peers import DRIVERS
from radixrt.bench.prompts import SIZES
from radixrt.cli_options import with_engine_options
from radixrt.errors import InvalidRequest, suggest

ARMS: dict[str, dict[str, Any]] = {
    "cache_off": {"prefix_cache": False},
    "fcfs": {"policy": "fcfs"},
    "forced_off": {"forced_runs": False},
}


@with_engine_options
def bench_workloads(
    *,
    only: Annotated[list[str] | None, typer.Option(help="run this workload only; repeatable")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help=f"besides the default, run this arm of {', '.join(ARMS)}; repeatable [all]"),
    ] = None,
    size: Annotated[str, typer.Option(help=f"how much of each: {', '.join(SIZES)}")] = "small",
    repetitions: Annotated[int, typer.Option(min=1, help="counted runs of each, after one that is not")] = 3,
    agent_logs: Annotated[
        Path | None,
        typer.Option(help="recorded agent calls, a file or a folder of JSON lines: one more workload"),
    ] = None,
    vs: Annotated[
        str | None, typer.Option(help=f"instead of other arms, run this peer in turn: {', '.join(DRIVERS)}")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="the Python of the environment where the peer is installed")
    ] = None,
    peer_model: Annotated[
        Path | None, typer.Option(help="the model for the peer: its folder or file, the same weights")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Time few-shot, forks, JSON, chats and agent calls with cache, order and forced runs on and off, or beside a peer."""
    from radixrt.bench.served import works_report
    from radixrt.bench.served_run import Comparison, Peer, compare  # loads torch

    _check("size", size, SIZES)
    for name in arm or ():
        _check("arm", name, ARMS)
    peer = None
    if vs is not None:
        _check("vs", vs, DRIVERS)
        if peer_python is None or peer_model is None or arm:
            raise InvalidRequest("vs needs peer-python and peer-model, and takes no arm", parameter="vs")
        peer = Peer(vs, peer_python, peer_model)
    elif peer_python is not None or peer_model is not None:
        raise InvalidRequest("peer-python and peer-model need vs", parameter="vs")
    measured = compare(
        Comparison(
            options,
            {} if peer else {name: ARMS[name] for name in arm or ARMS},
            peer,
            only,
            size,
            repetitions,
            agent_logs,
        )
    )
    typer.echo(json.dumps(measured) if as_json else works_report(measured))


def _check(parameter: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise InvalidRequest(
            f"{parameter} must be one of {', '.join(known)}, got {name!r}.{suggest(name, known)}",
            parameter=parameter,
            value=name,
        )
