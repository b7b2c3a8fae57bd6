"""A trace: the tree of program, branches and calls, with every piece of text that was sent or came back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from frontend_lang.backends import InvalidRequest, RecordedCall, Recording, ReplayBackend, Usage
from frontend_lang.backends.recording import RunFile
from frontend_lang.trace import CallRecord, table, total_usage
from frontend_lang.traces.page import as_fragment, as_page
from frontend_lang.traces.soundness import faults
from frontend_lang.traces.text import as_text
from frontend_lang.transcript import Segment


@dataclass(frozen=True, slots=True)
class TracedBranch:
    """One line of execution.

    Attributes:
        path: "root", or the fork: "root/0" is the first child.
        place: how many of its parent's segments stand before the fork.
        segments: what it added, in order.
        messages: (role, content) of its chat so far, its parents' included.
        error: what ended it, or None.
    """

    path: str
    place: int = 0
    segments: tuple[Segment, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    error: str | None = None

    @property
    def number(self) -> int:
        """Give which of its parent's branches it is, from 0; 0 for the root."""
        tail = self.path.rpartition("/")[2]
        return int(tail) if tail.isdecimal() else 0

    @property
    def parent(self) -> str | None:
        """Give the parent's path; None for the root."""
        head, _, tail = self.path.rpartition("/")
        return head if tail and head else None


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long a call took, in seconds.

    Attributes:
        first_token_s: from its start to its first token; None where the runtime does not tell.
        queued_s: of these, until the runtime began with it; None where it does not tell, and of selects and decides.
        num_requests: how many it sent to the runtime: several for a retry or some selects, 0 if it did not come so far.
    """

    total_s: float
    first_token_s: float | None
    queued_s: float | None
    num_requests: int


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run that a program started inside its own.

    Attributes:
        branch, place: it began behind so many segments of this branch.
        num_forked: and behind so many branches that parted from it.
    """

    branch: str
    place: int
    num_forked: int
    trace: Trace


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of a program did; `print(trace)` shows it as a tree.

    Attributes:
        program: its name.
        calls: every call of all branches, in order of start; those of the runs inside are in their own traces.
        branches: the root first, each after its parent.
        recording: what the runtime was asked and said, for `replay`.
        error: what the run ended with, or None.
        nested: the runs that the program started (`other.run(...)`), in order of start.
    """

    program: str
    calls: tuple[CallRecord, ...]
    branches: tuple[TracedBranch, ...]
    recording: Recording = field(repr=False)
    error: str | None = None
    nested: tuple[TracedRun, ...] = ()

    def __str__(self) -> str:
        return as_text(self)

    def html(self) -> str:
        """Give one self-contained page: nothing is fetched, text is escaped, it reads without scripts."""
        return as_page(self)

    def _repr_html_(self) -> str:
        """Show it in a notebook where it is the value of a cell."""
        return as_fragment(self)

    @property
    def usage(self) -> Usage:
        """Give the sum over all calls, without those of the runs inside."""
        return total_usage([call.usage for call in self.calls])

    def table(self) -> str:
        """Give a plain-text table of the calls and their token counts."""
        return table(self.calls)

    def branch(self, path: str = "root") -> TracedBranch:
        """Give a branch by its path.

        Raises:
            InvalidRequest: there is none.
        """
        for branch in self.branches:
            if branch.path == path:
                return branch
        paths = ", ".join(branch.path for branch in self.branches[:20])
        raise InvalidRequest(
            f"the trace has no branch {path!r}; it has {paths}", parameter="path", value=path
        )

    def call(self, index: int) -> CallRecord:
        """Give a call by its index.

        Raises:
            InvalidRequest: there is none.
        """
        for call in self.calls:
            if call.index == index:
                return call
        raise InvalidRequest(f"the trace has no call {index!r}", parameter="index", value=index)

    def text(self, path: str = "root") -> str:
        """Give the whole transcript of a branch, what it inherited included."""
        return self._before(path) + _joined(self.branch(path).segments)

    def messages(self, path: str = "root") -> list[dict[str, str]]:
        """Give the chat messages of a branch as dicts of "role" and "content"."""
        return [{"role": role, "content": content} for role, content in self.branch(path).messages]

    def prompt(self, index: int) -> str:
        """Give the text that stood before a call, exactly as it was sent, template included.

        What a call sends beyond its branch's transcript, as `decide` does, is in `sent`.
        """
        call = self.call(index)
        segments = self.branch(call.branch).segments
        later = (
            place
            for place, segment in enumerate(segments)
            if segment.call_index is not None and segment.call_index >= index
        )
        return self._before(call.branch) + _joined(segments[: next(later, len(segments))])

    def requests(self, index: int) -> list[RecordedCall]:
        """Give what a call asked of the runtime: usually one request, none if it did not come so far."""
        call = self.call(index)
        earlier = [other for other in self.calls if other.branch == call.branch and other.index < index]
        site = f"{self.program}:{call.branch}#{len(earlier)}"
        return [recorded for recorded in self.recording.calls if recorded.site == site]

    def sent(self, index: int) -> list[str]:
        """Give the prompt of each request of a call as text, template included; equal ones once.

        Where a request goes on behind the transcript (a question of `decide`) that text follows; ids whose text the
        run never saw, and a token that was taken back to be healed, are told in brackets.
        """
        call, text = self.call(index), self.prompt(index)
        found = [
            self._text_of(request.request.prompt_ids, call.prompt_ids, text)
            for request in self.requests(index)
        ]
        return list(dict.fromkeys(found)) or [text]

    def _text_of(self, sent_ids: tuple[int, ...], known_ids: tuple[int, ...], known: str) -> str:
        if sent_ids[: len(known_ids)] != known_ids:
            return f"{known}[other ids: {len(sent_ids)}]"
        rest, text = sent_ids[len(known_ids) :], known
        while rest:
            pieces, ids = max(
                (
                    (pieces, ids)
                    for _, pieces, ids in self.recording.encoded
                    if ids and rest[: len(ids)] == ids
                ),
                key=lambda item: len(item[1]),
                default=((), ()),
            )
            if not ids:
                return f"{text}[ids {list(rest)}]"
            text, rest = text + "".join(piece.text for piece in pieces), rest[len(ids) :]
        return text

    def times(self, index: int) -> CallTimes:
        """Give how long a call took."""
        call, requests = self.call(index), self.requests(index)
        first_s = requests[-1].first_token_s if requests else None
        if first_s is not None:  # of a call that was sent again, the waiting before counts too
            first_s += requests[-1].started_s - requests[0].started_s
        return CallTimes(call.seconds, first_s, call.queued_s, len(requests))

    def save(self, path: str | Path) -> None:
        """Write it as JSON; `Trace.load` and `ReplayBackend.load` read it."""
        parts = {item.name: getattr(_plain(self), item.name) for item in fields(self)}
        TraceFile(**{**parts, "nested": (), "runs": tuple(_flat(self))}).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            InvalidRequest: not such a file, of another version, or its parts do not fit together.
        """
        file = TraceFile.load(path)
        try:
            nested = file.nested + _nested(file.runs)
        except ValueError as error:
            raise InvalidRequest(f"{path} is not the trace of a run: {error}", parameter="path") from None
        trace = cls(file.program, file.calls, file.branches, file.recording, file.error, nested)
        if (fault := next(faults(trace), None)) is not None:
            raise InvalidRequest(
                f"{path} is not the trace of a run: {fault}", parameter="path", value=str(path)
            )
        return trace

    def replay(self) -> ReplayBackend:
        """Give a backend that answers as the runtime did: `program.with_options(backend=trace.replay()).run(...)`."""
        return ReplayBackend(self.recording)

    def _before(self, path: str) -> str:
        parts: list[str] = []
        branch = self.branch(path)
        while branch.parent is not None:
            place, branch = branch.place, self.branch(branch.parent)
            parts.append(_joined(branch.segments[:place]))
        return "".join(reversed(parts))


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run inside another one, as it stands in a file.

    Attributes:
        parent: place among the saved runs of the one that started it; None = the trace itself.
        run: without the runs inside it.
    """

    parent: int | None
    run: TracedRun


class TraceFile(RunFile):
    """A saved trace.

    Attributes:
        runs: all runs inside, each after its parent: readers of JSON take no deep values, and programs may recurse.
        nested: the same as a tree, in files of earlier versions.
    """

    program: str
    calls: tuple[CallRecord, ...]
    branches: tuple[TracedBranch, ...]
    error: str | None = None
    nested: tuple[TracedRun, ...] = ()
    runs: tuple[SavedRun, ...] = ()


def _joined(segments: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in segments)


def _plain(trace: Trace) -> Trace:
    """Give a trace with plain dicts and without the runs inside. Pure."""
    calls = tuple(replace(call, distribution=_dict(call.distribution)) for call in trace.calls)
    return replace(trace, calls=calls, nested=())


def _flat(trace: Trace) -> list[SavedRun]:
    """Give all runs inside a trace, each after its parent; those of one parent in order. Pure."""
    found: list[SavedRun] = []
    waiting: deque[tuple[int | None, TracedRun]] = deque((None, run) for run in trace.nested)
    while waiting:
        parent, run = waiting.popleft()
        waiting.extend((len(found), inner) for inner in run.trace.nested)
        found.append(SavedRun(parent, replace(run, trace=_plain(run.trace))))
    return found


def _nested(runs: Sequence[SavedRun]) -> tuple[TracedRun, ...]:
    """Undo `_flat`. Pure.

    Raises:
        ValueError: a run does not stand after its parent.
    """
    inside: dict[int | None, deque[TracedRun]] = defaultdict(deque)
    for number in reversed(range(len(runs))):
        parent, run = runs[number].parent, runs[number].run
        if parent is not None and not 0 <= parent < number:
            raise ValueError(f"saved run {number} does not stand after its parent")
        whole = replace(run.trace, nested=run.trace.nested + tuple(inside.pop(number, ())))
        inside[parent].appendleft(replace(run, trace=whole))
    return tuple(inside[None])


def _dict(distribution: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if distribution is None else dict(distribution)


def plain(messages: list[dict[str, str]]) -> tuple[tuple[str, str], ...]:
    """Give messages as pairs. Pure."""
    return tuple((message["role"], message["content"]) for message in messages)


__all__ = ["CallTimes", "Trace", "TraceFile", "TracedBranch", "TracedRun", "plain"]
