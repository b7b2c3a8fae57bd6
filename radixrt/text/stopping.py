"""Stop strings: where they end a text that comes piece by piece, and tool calls, in which they do not."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.text.json_end import JsonEnd
from radixrt.types import CallMarks


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and whether a stop string ended the text."""

    text: str
    is_stopped: bool


class StopStrings:
    """Give text up to the first stop string, and never any part of one.

    The stop string that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._max_held = max(map(len, stop), default=1) - 1
        self._held = ""  # not given yet: it may begin a stop string
        self._num_exempt = 0  # characters of `held` that came while stopping was not allowed
        self._is_stopped = False

    def push(self, new_text: str, *, allow_stop: bool = True, is_last: bool = False) -> TextDelta:
        """Take new text and give what is certain.

        Args:
            allow_stop: False: a stop string that is complete by now is text.
            is_last: nothing follows to which what is held back could belong.
        """
        if self._is_stopped:
            return TextDelta("", True)
        text = self._held + new_text
        if not allow_stop:
            self._num_exempt = len(text)
        cut = self._stop_position(text)
        self._is_stopped = cut is not None
        if cut is None:
            cut = len(text) - (0 if is_last else _num_begun(text, self._stop, self._max_held))
        self._held = "" if self._is_stopped else text[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return TextDelta(text[:cut], self._is_stopped)

    def _stop_position(self, text: str) -> int | None:
        """Give where the winning stop string begins."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches)[1] if matches else None


class StopStringsAroundCalls:
    """StopStrings for the text around tool calls: none has any part in a call, which is whole or not there.

    Nor does one end in the white space behind a call, which nobody is given. What may begin a call waits until it is clear.
    """

    def __init__(self, stop: tuple[str, ...], marks: CallMarks) -> None:
        self._text = StopStrings(stop)
        self._marks = marks
        self._undecided = ""  # it may begin a call
        self._num_exempt = 0  # characters of it that came while stopping was not allowed
        self._call: _Call | None = None
        self._is_after_call = False

    def push(self, new_text: str, *, allow_stop: bool = True, is_last: bool = False) -> TextDelta:
        """Take new text and give what is certain; see StopStrings."""
        begin, rest, given = self._marks.begin, self._undecided + new_text, ""
        num_free = len(rest) - self._num_exempt if allow_stop else 0  # the last ones
        self._undecided, self._num_exempt = "", 0
        while rest:
            if self._call is not None:
                num_taken = self._call.take(rest)
                given, rest = given + rest[:num_taken], rest[num_taken:]
                if self._call.is_over:
                    self._call, self._is_after_call = None, True
                continue
            at = rest.find(begin)
            is_call = at >= 0
            if not is_call:
                at = len(rest) - (0 if is_last else _num_begun(rest, (begin,), len(begin) - 1))
                self._undecided = rest[at:]
                self._num_exempt = max(0, len(self._undecided) - num_free)
            delta = self._around(rest[:at], num_exempt=max(0, len(rest) - num_free), is_last=is_call)
            given += delta.text
            if delta.is_stopped:
                return TextDelta(given, True)
            if not is_call:
                break
            cut = at + self._marks.num_before_json
            given, rest = given + rest[at:cut], rest[cut:]
            self._call = _Call(self._marks)
        delta = self._text.push("", is_last=is_last)
        return TextDelta(given + delta.text, delta.is_stopped)

    def _around(self, text: str, *, num_exempt: int, is_last: bool) -> TextDelta:
        """Take text that is in no call; no stop string ends in its first num_exempt characters."""
        if self._is_after_call:
            num_blank = len(text) - len(text.lstrip())
            num_exempt = max(num_exempt, num_blank)
            self._is_after_call = num_blank == len(text)
        exempt = self._text.push(text[:num_exempt], allow_stop=False).text
        delta = self._text.push(text[num_exempt:], is_last=is_last)
        return TextDelta(exempt + delta.text, delta.is_stopped)


class _Call:
    """Find where a call ends, from what stands before its JSON on."""

    def __init__(self, marks: CallMarks) -> None:
        self.is_over = False
        self._opener = marks.opener
        self._json: JsonEnd | None = None
        self._is_closed = False
        self._end = marks.end  # what is still to come of it

    def take(self, text: str) -> int:
        """Give how much of the text belongs to the call."""
        at = 0
        if self._json is None:
            at = text.find(self._opener)
            if at < 0:
                return len(text)
            self._json = JsonEnd()
        if not self._is_closed:
            length = self._json.find(text[at:])
            if length is None:
                return len(text)
            self._is_closed = True
            at += length
        while self._end and text[at : at + 1] == self._end[0]:
            self._end = self._end[1:]
            at += 1
        self.is_over = not self._end or at < len(text)
        return at


def _num_begun(text: str, wanted: tuple[str, ...], limit: int) -> int:
    """Give the length of the longest end of the text, at most `limit`, that begins one of the wanted texts. Pure."""
    for length in range(min(limit, len(text)), 0, -1):
        end = text[-length:]
        if any(item.startswith(end) for item in wanted):
            return length
    return 0
