"""Run a program of a user's file from the command line.

The program language is not imported here: a program is anything with the three members of `RunnableProgram`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from radixrt.engine import Engine
from radixrt.errors import InvalidRequest, suggest


class ProgramOutput(Protocol):
    """What a run leaves for the command line to print."""

    @property
    def value(self) -> Any:
        """What the function returned."""

    @property
    def variables(self) -> dict[str, Any]:
        """Values by name."""

    def text(self) -> str:
        """The transcript."""

    def table(self) -> str:
        """Token counts per call."""


@runtime_checkable
class RunnableProgram(Protocol):
    """What `FILE.py:name` must name."""

    @property
    def function(self) -> Callable[..., Any]:
        """The decorated function; its first parameter is the state."""

    def with_options(self, *, engine: Engine) -> RunnableProgram:
        """Give the same program bound to an engine."""

    def run(self, **arguments: Any) -> ProgramOutput:
        """Run it."""


def load_program(target: str) -> RunnableProgram:
    """Load "FILE.py:program", or the only program of "FILE.py".

    Raises:
        InvalidRequest: no such file or program (suggests the nearest name).
    Changes: runs the file as a module of its own, with its folder on sys.path as python does.
    """
    file, _, name = target.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InvalidRequest(f"no such Python file: {file}", parameter="program", value=target)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that annotations in the file can be resolved
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest(
            f"{file} cannot be loaded:\n{short_traceback(error)}", parameter="program", value=target
        ) from error
    programs = {key: value for key, value in vars(module).items() if isinstance(value, RunnableProgram)}
    if not name and len(programs) == 1:
        return next(iter(programs.values()))
    known = ", ".join(programs) or "none"
    if not name:
        raise InvalidRequest(
            f"say which program of {file}: {file}:NAME (it has: {known})", parameter="program", value=target
        )
    if name not in programs:
        raise InvalidRequest(
            f'{file} has no program "{name}" (it has: {known}).{suggest(name, programs)}',
            parameter="program",
            value=target,
        )
    return programs[name]


def parse_arguments(program: RunnableProgram, pairs: list[str]) -> dict[str, Any]:
    """Give `k=v` pairs as keyword arguments: text for parameters annotated str or not at all, JSON for others.

    Raises:
        InvalidRequest: not a pair, unknown or missing parameter, or not JSON.
    """
    parameters = _parameters(program)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--arg must be name=value, got {pair!r}", parameter="arg", value=pair)
        if name not in parameters:
            raise InvalidRequest(
                f"the program has no parameter {name!r}.{suggest(name, parameters)}",
                parameter=name,
                value=text,
            )
        arguments[name] = _parse(name, text, parameters[name])
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    if missing:
        raise InvalidRequest(
            f"the program needs {', '.join(f'--arg {name}=...' for name in missing)}", parameter=missing[0]
        )
    return arguments


def _parameters(program: RunnableProgram) -> Mapping[str, inspect.Parameter]:
    _, *others = inspect.signature(program.function, eval_str=True).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {item.name: item for item in others if item.kind in named}


def _parse(name: str, text: str, parameter: inspect.Parameter) -> Any:
    if parameter.annotation in (parameter.empty, str, Any):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"--arg {name} is not annotated str, so its value must be JSON: {error}",
            parameter=name,
            value=text,
        ) from None


def short_traceback(error: BaseException) -> str:
    """Give an error's traceback without the frames of this project and of installed packages."""
    here = str(Path(__file__).parents[1])
    trace = traceback.TracebackException.from_exception(error)
    own = [
        frame
        for frame in trace.stack
        if not frame.filename.startswith((here, sys.prefix, sys.base_prefix, "<frozen"))
        or Path(frame.filename).parts[len(Path(here).parts) :][:1] == ("examples",)
    ]
    trace.stack = traceback.StackSummary.from_list(own)
    trace.__context__ = trace.__cause__ = None
    return "".join(trace.format()).rstrip()


def source_of(program: RunnableProgram) -> str:
    """Give the program's source text."""
    return inspect.getsource(program.function).rstrip()
