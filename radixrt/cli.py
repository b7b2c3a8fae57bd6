"""radixrt on the command line: demo, run, serve, models, doctor, bench."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from radixrt import __version__
from radixrt.bench.cache_cli import bench_cache
from radixrt.bench.gpu_cli import bench_gpu
from radixrt.bench.served_cli import bench_workloads
from radixrt.cli_grammar import bench_grammar, grammar_app
from radixrt.cli_options import with_engine_options
from radixrt.cli_serve import serve
from radixrt.config import EngineConfig, environment_help, home_folder
from radixrt.errors import RadixrtError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A structured-generation runtime with a radix prefix cache.",
)
models_app = typer.Typer(no_args_is_help=True, help="The model files on this machine.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(models_app, name="models")
app.add_typer(grammar_app, name="grammar")
app.add_typer(bench_app, name="bench")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

DEMO_TEXT = "The lamp is bright and looks great, but the switch broke after two days."


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and status 1, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except RadixrtError as error:
        errors.print(f"radixrt: {error}", markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
@with_engine_options
def demo(*, options: dict[str, Any]) -> None:
    """Run a forked, constrained few-shot program on the small default model."""
    started = time.perf_counter()
    from radixrt.programs import load_program, source_of  # torch is loaded only by commands that need it

    package = importlib.util.find_spec("frontend_lang")
    assert package is not None
    assert package.origin is not None
    program = load_program(str(Path(package.origin).with_name("demo.py")))
    with _engine(options) as engine:
        _describe(engine, time.perf_counter() - started)
        _show_source(source_of(program))
        result = program.with_options(engine=engine).run(text=DEMO_TEXT)
        for name, value in result.value.items():
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
        console.print()
        console.print(result.table(), markup=False, soft_wrap=True)
    console.print(f"\n{time.perf_counter() - started:.1f} s in all", markup=False, soft_wrap=True)


@app.command()
@with_engine_options
def run(
    program: Annotated[str, typer.Argument(metavar="FILE.py:program", help="the program to run")],
    *,
    arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="an argument of the program; repeatable")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Run a program from a file and print its variables and where its tokens came from."""
    from radixrt.programs import load_program, parse_arguments, short_traceback

    found = load_program(program)
    arguments = parse_arguments(found, arg or [])
    with _engine(options) as engine:
        try:
            result = found.with_options(engine=engine).run(**arguments)
        except RadixrtError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own code
            errors.print(short_traceback(error), markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
    if as_json:
        values = {"value": result.value, "variables": result.variables, "text": result.text()}
        print(json.dumps(values, ensure_ascii=False, default=_plain))
        return
    console.print(result.text(), markup=False, soft_wrap=True)
    console.print()
    if result.value is not None:
        console.print(f"returned: {result.value!r}", markup=False, soft_wrap=True)
    for name, value in result.variables.items():
        console.print(f"{name}: {value!r}", markup=False, soft_wrap=True)
    console.print()
    console.print(result.table(), markup=False, soft_wrap=True)


def _show_source(text: str) -> None:
    """Print Python source: coloured on a terminal, as it is elsewhere."""
    if console.is_terminal:
        console.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        console.print(text, markup=False, soft_wrap=True)
    console.print()


def _plain(value: Any) -> Any:
    """Give JSON data for a value of a program (a Pydantic model, or anything printable)."""
    from pydantic import BaseModel

    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _engine(options: dict[str, Any]) -> Any:
    from radixrt.engine import Engine

    engine = Engine(**options)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on Ctrl-C closes what is open
    return engine


def _describe(engine: Any, seconds: float) -> None:
    config = engine.config
    console.print(
        f"radixrt {__version__}: {config.options.model.model} on {config.device.type}, "
        f"{str(config.dtype).removeprefix('torch.')}, {config.num_kv_tokens} tokens of KV, "
        f"ready in {seconds:.1f} s\n",
        markup=False,
        soft_wrap=True,
    )


@app.command()
@with_engine_options
def doctor(*, options: dict[str, Any]) -> None:
    """Say what this machine has, what is missing, and the command that mends it."""
    from radixrt.doctor import examine

    is_sound = True
    for finding in examine(EngineConfig.load(options), home=home_folder()):
        mark = "ok " if finding.is_ok else "NO "
        remedy = f"  -> {finding.remedy}" if finding.remedy else ""
        console.print(f"{mark} {finding.topic}: {finding.text}{remedy}", markup=False, soft_wrap=True)
        is_sound = is_sound and finding.is_ok
    if not is_sound:
        raise typer.Exit(1)


@app.command()
def options() -> None:
    """List every option: its environment variable and what it does."""
    for name, text in environment_help():
        console.print(f"{name}: {text}", markup=False, soft_wrap=True)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)


@models_app.command("list")
def list_models() -> None:
    """List the models that are here and those that can be fetched by name."""
    from radixrt.model.catalog import list_models as entries

    table = Table("name", "state", "source", box=None, pad_edge=False)
    for entry in entries(home_folder()):
        table.add_row(entry.name, f"{entry.num_bytes / 1e6:.0f} MB" if entry.folder else "-", entry.source)
    console.print(table)


@models_app.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help="catalog name, hub id or .gguf file")]) -> None:
    """Fetch a model, or check every byte of one that is here and mend it."""
    from radixrt.model.catalog import pull

    console.print(str(pull(name, home=home_folder(), show_progress=True)), markup=False, soft_wrap=True)


@models_app.command("rm")
def remove_model(name: Annotated[str, typer.Argument(help="name as `radixrt models list` shows it")]) -> None:
    """Delete a model's files."""
    from radixrt.model.catalog import remove

    was_there = remove(name, home=home_folder())
    console.print(f"{name}: {'removed' if was_there else 'was not here'}", markup=False, soft_wrap=True)


@bench_app.command("engine")
@with_engine_options
def bench_engine(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Time prefill, decode, and few-shot requests with the prefix cache on and off."""
    from radixrt.bench.engine import measure, report

    measured = measure(options)
    print(json.dumps(measured) if as_json else report(measured))


@bench_app.command("kernels")
def bench_kernels(
    *,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="threads of the kernels")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Time the CPU kernels of a layer within a step against plain torch and against reading the same bytes."""
    from radixrt.bench.kernels import kernels_report, measure_kernels

    measured = measure_kernels(threads=threads)
    print(json.dumps(measured) if as_json else kernels_report(measured))


@bench_app.command("serve")
@with_engine_options
def bench_serve(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Compare requests over HTTP with the same ones in this process."""
    from radixrt.bench.serve import measure, report

    measured = measure(options)
    print(json.dumps(measured) if as_json else report(measured))


app.command("serve")(serve)
bench_app.command("cache")(bench_cache)
bench_app.command("workloads")(bench_workloads)
bench_app.command("grammar")(bench_grammar)
bench_app.command("gpu")(bench_gpu)


if __name__ == "__main__":
    main()
