"""The entry of the command line, before anything heavy is imported."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line.

    Until the engine is up, Ctrl-C ends the process as the system does it: Python's own handler raises inside whatever
    is being imported, where the exception can get lost.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from radixrt.cli import main as run

    run()
