"""Where a JSON value ends in text that comes piece by piece."""

from __future__ import annotations


class JsonEnd:
    """Find where a JSON object or array ends, piece by piece.

    Invariant: brackets in strings do not count.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Give how much of the text belongs to the value, None if it does not end here."""
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None
