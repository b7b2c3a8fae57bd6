"""Every exception that radixrt raises.

RadixrtError
├── RequestError            the caller's fault; has .parameter and .value (HTTP 4xx)
│   ├── InvalidRequest      a value breaks a rule
│   ├── PromptTooLong       the prompt leaves no room in the model's context
│   ├── NeverFits           the request needs more pages than the pool has
│   ├── UnsupportedGrammar  a constraint that cannot be enforced exactly
│   ├── GrammarTooCostly    a constraint over the size or time limit
│   ├── QueueFull           too many requests wait; try again later (HTTP 429)
│   └── UnknownModel        no such model name (HTTP 404)
├── EngineError             not the caller's fault (HTTP 5xx)
│   ├── ModelLoadError      missing, corrupt or unsupported model files
│   ├── DeviceError         a step failed on the device; only its sequences fail
│   ├── GrammarDeadEnd      a constraint left no token to choose; only its sequence fails
│   ├── RequestAborted      someone aborted the request that the caller waits for
│   ├── DeadlineExceeded    the request was not done within its timeout_s
│   └── EngineStopped       the engine was closed or died
├── ProgramError            raised in a program: carries line, call name and prompt so far
└── InvariantViolation      a bug in radixrt; the engine stops
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RadixrtError(Exception):
    """Be the root of all errors that radixrt raises on purpose."""


class RequestError(RadixrtError):
    """Say which parameter of a request breaks which rule.

    Attributes:
        parameter: name of the parameter, or a JSON Pointer into it ("grammar/properties/a").
        value: what was given.
    """

    def __init__(self, message: str, *, parameter: str, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class InvalidRequest(RequestError):
    """A value breaks a rule."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for one new token in the model's context."""


class NeverFits(RequestError):
    """The request needs more pages than the whole pool has."""


class UnsupportedGrammar(RequestError):
    """A constraint cannot be enforced exactly; `parameter` is the JSON Pointer of the keyword."""


class GrammarTooCostly(RequestError):
    """A constraint is over its size or time limit."""


class QueueFull(RequestError):
    """Too many requests wait already."""


class UnknownModel(RequestError):
    """No model has this name."""


class EngineError(RadixrtError):
    """A failure that the caller did not cause."""


class ModelLoadError(EngineError):
    """Model files are missing, corrupt or of an unsupported kind."""


class DeviceError(EngineError):
    """A step failed on the device."""


class GrammarDeadEnd(EngineError):
    """A constraint left no token to choose."""


class RequestAborted(EngineError):
    """The request was aborted while the caller waited for it."""


class DeadlineExceeded(EngineError):
    """The request was not done within its timeout_s."""

    def __init__(self, message: str = "the request was not done within its timeout_s") -> None:
        super().__init__(message)


class EngineStopped(EngineError):
    """The engine was closed or died; the cause, if any, is chained."""


class ProgramError(RadixrtError):
    """An error inside a program, told to the reader of the value and at the end of `run`.

    Attributes:
        program: name of the program.
        location: "file:line" of the program statement, or None.
        call: name of the gen/select whose value is missing, or None.
        prompt: the transcript up to the failing call.
    """

    def __init__(
        self,
        message: str,
        *,
        program: str = "",
        location: str | None = None,
        call: str | None = None,
        prompt: str = "",
    ) -> None:
        super().__init__(message)
        self.program = program
        self.location = location
        self.call = call
        self.prompt = prompt


class InvariantViolation(RadixrtError):
    """An owner's invariant does not hold: a bug in radixrt."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Give ' Did you mean "x"?' for the nearest known name, or ''. Pure."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def first_line(error: BaseException) -> str:
    """Give the error's first line of text, or its type's name when it has none. Pure."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
