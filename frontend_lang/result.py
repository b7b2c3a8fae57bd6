"""What one run of a program left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from frontend_lang.aliases import meta_info
from frontend_lang.backends import ProgramError, Usage
from frontend_lang.branch import Key, Reply
from frontend_lang.builders import nearest
from frontend_lang.nodes import Call
from frontend_lang.outcome import Failure
from frontend_lang.reading import shown
from frontend_lang.trace import CallRecord, table, total_usage
from frontend_lang.traces import Seen, Trace
from frontend_lang.transcript import Transcript

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProgramResult(Generic[R_co]):
    """What one run of a program left: `result["x"]`, `result.text()`, and what it cost.

    Attributes:
        program: name of the program.
        value: what the function returned.
        calls: every gen and select of all branches, in order of start.
    """

    program: str
    value: R_co
    calls: tuple[CallRecord, ...]
    _transcript: Transcript = field(repr=False)
    _variables: Mapping[Key, Reply | Failure] = field(repr=False)
    _seen: Seen = field(repr=False)

    @overload
    def __getitem__(self, name: Call[T]) -> T: ...

    @overload
    def __getitem__(self, name: str) -> Any: ...

    def __getitem__(self, name: Key) -> Any:
        """Give the value of the last call named `name`, or of this very call; raises ProgramError when it has none."""
        return self._reply(name).value

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def record(self, name: Key) -> CallRecord:
        """Give the record behind `name`: token counts, logprobs, the distribution of a select.

        Raises:
            ProgramError: as reading `name`, or no single call set it.
        """
        record = self._reply(name).record
        if record is None:
            raise ProgramError(f"{name!r} is not of one call", program=self.program)
        return record

    def get_var(self, name: str) -> Any:
        """Give `result[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """Give counts and log-probabilities of a call under SGLang's names, see aliases.meta_info."""
        return meta_info(self._reply(name))

    @property
    def ret_value(self) -> R_co:
        """Give `value`."""
        return self.value

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Give the text, or a variable's, in one piece; `stream` gives it as it comes."""
        yield self.text() if var_name is None else str(self[var_name])

    def error(self) -> None:
        """Give None: a run that fails raises, it leaves no result."""

    def sync(self) -> None:
        """Do nothing: the program has ended."""

    def _reply(self, name: Key) -> Reply:
        settled = self._variables.get(name)
        if settled is None:
            hint = "" if isinstance(name, Call) else nearest(str(name), self.variables)
            raise ProgramError(
                f'program "{self.program}" has set no {shown(name)}.{hint}',
                program=self.program,
                call=name.name if isinstance(name, Call) else name,
            )
        if isinstance(settled, Failure):
            raise settled.error(reading=name.name if isinstance(name, Call) else name)
        return settled

    @property
    def variables(self) -> dict[str, Any]:
        """Give the variables that have a value, by name."""
        return {
            name: settled.value
            for name, settled in self._variables.items()
            if isinstance(settled, Reply) and isinstance(name, str)
        }

    @property
    def usage(self) -> Usage:
        """Give the sum over all calls."""
        return total_usage([call.usage for call in self.calls])

    @property
    def trace(self) -> Trace:
        """Give what the run did: the tree of calls with their texts, counts and times."""
        return self._seen.trace()

    def text(self) -> str:
        """Give the transcript as text."""
        return self._transcript.text

    def messages(self) -> list[dict[str, str]]:
        """Give the chat messages as dicts of "role" and "content"."""
        return self._transcript.messages

    def token_ids(self) -> tuple[int, ...]:
        """Give the transcript as token ids."""
        return self._transcript.told_ids()

    def table(self) -> str:
        """Give a plain-text table of the calls: prompt, cached, computed, forced and output tokens."""
        return table(self.calls)
