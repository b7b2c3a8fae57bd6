"""What is kept of a run, so that a trace can be made of it when somebody asks: references, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from frontend_lang.backends import InvalidRequest, RecordingBackend
from frontend_lang.branch import Nested, ProgramRun
from frontend_lang.outcome import Failure, summary
from frontend_lang.trace import CallRecord
from frontend_lang.traces.model import Trace, TracedBranch, TracedRun, plain
from frontend_lang.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Seen:
    """Hold the parts of a run that has ended."""

    program: str
    calls: tuple[CallRecord, ...]
    branches: tuple[tuple[str, Transcript, Failure | None], ...]
    recorder: RecordingBackend
    nested: tuple[Nested, ...]

    def trace(self, error: BaseException | None = None) -> Trace:
        """Make the trace.

        Args:
            error: what the run ended with.
        """
        starts: dict[str, int] = {}
        traced: list[TracedBranch] = []
        for path, transcript, failure in self.branches:
            # Text behind the last call is encoded now, so that a replayed run can be asked for its ids too. What cannot
            # be encoded was never sent, and fails there as it does here.
            with suppress(InvalidRequest):
                transcript.token_ids()
            starts[path] = transcript.num_inherited
            parent = path.rpartition("/")[0]
            traced.append(
                TracedBranch(
                    path,
                    transcript.num_inherited - starts.get(parent, 0),
                    transcript.own_segments,
                    plain(transcript.messages),
                    None if failure is None else f"{failure.label}: {summary(failure.cause)}",
                )
            )
        told = None if error is None else str(error) or type(error).__name__
        runs = tuple(run for nested in self.nested for run in _traced(nested))
        return Trace(self.program, self.calls, tuple(traced), self.recorder.recording, told, runs)


def _traced(nested: Nested) -> Iterator[TracedRun]:
    """Give the trace of a run inside; none of one that has not ended, as a tool that nobody waited for may leave it."""
    if nested.seen is None:
        return
    transcript = nested.branch.transcript
    place = transcript.marks.get(nested.mark, transcript.num_texts)  # behind all when its turn never came
    trace = nested.seen.trace(nested.error)
    yield TracedRun(nested.branch.path, place - transcript.num_inherited, nested.num_forked, trace)


def see(run: ProgramRun, recorder: RecordingBackend) -> Seen:
    """Keep what a run leaves."""
    return Seen(
        run.program,
        tuple(sorted(run.calls, key=lambda call: call.index)),
        tuple((branch.path, branch.transcript, branch.failure) for branch in run.branches),
        recorder,
        tuple(run.nested),
    )
