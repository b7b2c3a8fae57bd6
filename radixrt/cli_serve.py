"""`radixrt serve`: the HTTP server on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from radixrt.cli_options import with_server_options


@with_server_options
def serve(
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="catalog name, hub id, local folder or .gguf file")
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Serve a model over HTTP, in the OpenAI API's terms and in our own."""
    from radixrt.server.serve import run  # torch is loaded only by commands that need it

    if model_name is not None:
        options["model"] = model_name
    raise typer.Exit(run(options))
