r"""Patterns for the judge of finished values, read as masks read them.

The standard asks for ECMA 262. The `regex` package, which can be given a limit of time, reads some of it in another way:
\d and \w take all of Unicode, "$" matches before a line feed at the end. Those are written in other words here; what
would still mean something else is refused.
"""

from __future__ import annotations

import re

_GROUP = re.compile(
    r":|=|!|>|<[=!]|P?<[^\W\d]\w{0,99}>|P=\w{1,99}\)|[is]{1,2}(?:-[is]{1,2})?[:)]|-[is]{1,2}:"
)
_FUZZY = re.compile(r"\{\s{0,9}(?:\d{1,9}\s{0,9}<=?\s{0,9})?\d{0,9}\s{0,9}[eids]\b")
_NO_LEAST = re.compile(r"\{,\d{0,9}\}")
_NAMED_CLASS = re.compile(r"\[:\^?\w{1,99}:\]")
_BRACED = re.compile(r"\\[pP]\{[^{}]{0,99}\}")

_WORD = "A-Za-z0-9_"
_NO_WORD = r"\x00-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\U0010ffff"
_NO_DIGIT = r"\x00-\x2f\x3a-\U0010ffff"
_CLASSES = {"d": "0-9", "D": _NO_DIGIT, "w": _WORD, "W": _NO_WORD}
_BORDERS = {
    "b": f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))",
    "B": f"(?:(?<=[{_WORD}])(?=[{_WORD}])|(?<![{_WORD}])(?![{_WORD}]))",
}
_SAME_LETTERS = frozenset("sSnrtfvxupPk")  # escapes that mean the same to both


def translated(pattern: str) -> str:
    """Write a pattern so that the `regex` package reads it as masks do. Pure. Cost: linear.

    Raises:
        ValueError: it has something that the two read differently: a recursion (?R), an inexact match a{e<=1}, a named
            class [[:alpha:]], flags but i and s, an escape such as \\A.
    """
    parts: list[str] = []
    position, is_in_class, class_start = 0, False, 0
    while position < len(pattern):
        sign = pattern[position]
        if sign == "\\":
            text, position = _escape(pattern, position, is_in_class=is_in_class)
            is_class = is_in_class and pattern[position - 1] in _CLASSES and len(text) > 2
            if is_class and parts[-1] == "-" and len(parts) > class_start + 1:
                parts[-1] = r"\-"  # [+-\d] is no range
            parts.append(text)
            if is_class and pattern.startswith("-", position) and not pattern.startswith("-]", position):
                parts.append(r"\-")
                position += 1
            continue
        if is_in_class:
            if sign == "[" and _NAMED_CLASS.match(pattern, position):
                raise ValueError("it has a named class")
            is_in_class = sign != "]"
        elif sign == "[":
            is_in_class, class_start = True, len(parts)
            if pattern.startswith("^", position + 1):
                parts.append(sign)
                sign, position = "^", position + 1
                class_start += 1
            if pattern.startswith("]", position + 1):
                raise ValueError('"]" begins a class')
        elif sign == "$":
            sign = r"\Z"
        elif sign == "{" and (_FUZZY.match(pattern, position) or _NO_LEAST.match(pattern, position)):
            raise ValueError(f"{pattern[position : position + 20]!r} has another meaning in the standard")
        elif pattern.startswith("(?", position) and not _GROUP.match(pattern, position + 2):
            raise ValueError(f"{pattern[position : position + 20]!r} is unknown to the standard")
        parts.append(sign)
        position += 1
    return "".join(parts)


def _escape(pattern: str, position: int, *, is_in_class: bool) -> tuple[str, int]:
    """Give what stands for an escape, and the position after it."""
    if found := _BRACED.match(pattern, position):
        return found[0], found.end()
    name = pattern[position + 1 : position + 2]
    after = position + 2
    if name in _CLASSES:
        inner = _CLASSES[name]
        return (inner if is_in_class else f"[{inner}]"), after
    if name in _BORDERS:
        return (r"\x08" if is_in_class and name == "b" else _BORDERS[name]), after
    if name.isascii() and name.isalpha() and name not in _SAME_LETTERS:
        raise ValueError(f"the escape \\{name} has another meaning in the standard")
    return pattern[position:after], after
