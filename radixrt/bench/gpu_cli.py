"""`radixrt bench gpu` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from radixrt.errors import EngineError, InvalidRequest


def bench_gpu(
    *,
    dry: Annotated[
        bool, typer.Option("--dry", help="without a GPU: compile every kernel for sm_90 and print the plan")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option(help="also write everything as one JSON object to this file")
    ] = None,
) -> None:
    """Check and time every kernel on one CUDA device, against float64 and against its floor; then whole steps."""
    try:
        from radixrt.bench import gpu
    except ImportError as error:
        raise EngineError(f"radixrt bench gpu needs Triton: pip install 'radixrt[gpu]' ({error})") from error

    if json_file is not None:
        _refuse_unwritable(json_file)  # before the minutes of work
    outcome = gpu.dry_run(typer.echo) if dry else gpu.run(gpu.require_device(), typer.echo)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    if not all(figure["is_correct"] for figure in outcome.get("figures", [])):
        raise typer.Exit(1)


def _refuse_unwritable(path: Path) -> None:
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"json-file must be a file that can be written, got {path}: {error.strerror}",
            parameter="json-file",
            value=str(path),
        ) from error
