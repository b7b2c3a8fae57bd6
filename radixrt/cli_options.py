"""Command-line options, generated from the fields of EngineConfig."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

from radixrt.config import OptionSpec, option_specs


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of the engine; it receives those that were set as `options`."""
    return _with_options(command, [spec for spec in option_specs() if spec.section != "server"])


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of EngineConfig, the server's too."""
    return _with_options(command, list(option_specs()))


def _with_options(command: Callable[..., None], specs: list[OptionSpec]) -> Callable[..., None]:

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        options = {spec.name: values.pop(spec.name) for spec in specs}
        command(**values, options={name: value for name, value in options.items() if value is not None})

    own = [
        item
        for name, item in inspect.signature(command, eval_str=True).parameters.items()
        if name != "options"
    ]
    generated = []
    for spec in specs:
        default = "" if spec.default is None else f" [{spec.default}]"
        info = typer.Option(
            None,
            help=spec.help + default,
            envvar=None,
            rich_help_panel="Server options" if spec.section == "server" else "Engine options",
            show_default=False,
        )
        generated.append(
            inspect.Parameter(
                spec.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=info,
                annotation=spec.type | None,
            )
        )
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
    wrapped.__signature__ = inspect.Signature([*keyword_only, *generated])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in [*keyword_only, *generated]}
    return wrapped
