"""Processes that read constraints, held up by the system: what they do takes as long as a test needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from radixrt.grammar.worker import CompileWorker


def stop(worker: CompileWorker) -> int:
    """Stop a worker's process, so that it answers nothing until it goes on; give its id."""
    worker.warm()
    assert worker.process_id is not None
    os.kill(worker.process_id, signal.SIGSTOP)
    return worker.process_id


@contextmanager
def stopped(*workers: CompileWorker) -> Iterator[None]:
    """Stop the processes of workers while the block runs."""
    process_ids = [stop(worker) for worker in workers]
    try:
        yield
    finally:
        for process_id in process_ids:
            with suppress(ProcessLookupError):  # it was ended for being late
                os.kill(process_id, signal.SIGCONT)
