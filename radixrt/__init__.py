"""radixrt: a structured-generation runtime with a radix prefix cache.

Names are loaded on first use, so that the parts without tensors start in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.config import EngineConfig
    from radixrt.constraints import GrammarSpec, StructuralTag
    from radixrt.delivery import OutputCollector
    from radixrt.engine import AsyncEngine, Engine
    from radixrt.errors import (
        DeadlineExceeded,
        DeviceError,
        EngineError,
        EngineStopped,
        GrammarDeadEnd,
        GrammarTooCostly,
        InvalidRequest,
        InvariantViolation,
        ModelLoadError,
        NeverFits,
        ProgramError,
        PromptTooLong,
        QueueFull,
        RadixrtError,
        RequestAborted,
        RequestError,
        UnknownModel,
        UnsupportedGrammar,
    )
    from radixrt.explain import PrefixReport
    from radixrt.grammar.counters import CompileStats, GrammarStats
    from radixrt.histogram import Histogram
    from radixrt.loop import Scope, Ticket
    from radixrt.mailbox import Mailbox
    from radixrt.metrics import CacheStats, EngineStats, HitCount
    from radixrt.streams import ChunkStream, stream_chunks, whole_output
    from radixrt.text.tool_forms import ToolForm
    from radixrt.types import (
        FinishReason,
        ForcedSpan,
        GenerateRequest,
        GenerationOutput,
        Namespace,
        Origin,
        OutputChunk,
        Sample,
        SamplingParams,
        TextPiece,
        TokenLogprob,
        Usage,
    )

__version__ = "0.1.0"

_ERRORS = (
    "DeadlineExceeded",
    "DeviceError",
    "EngineError",
    "EngineStopped",
    "GrammarDeadEnd",
    "GrammarTooCostly",
    "InvalidRequest",
    "InvariantViolation",
    "ModelLoadError",
    "NeverFits",
    "ProgramError",
    "PromptTooLong",
    "QueueFull",
    "RadixrtError",
    "RequestAborted",
    "RequestError",
    "UnknownModel",
    "UnsupportedGrammar",
)
_TYPES = (
    "FinishReason",
    "ForcedSpan",
    "GenerateRequest",
    "GenerationOutput",
    "Namespace",
    "Origin",
    "OutputChunk",
    "Sample",
    "SamplingParams",
    "TextPiece",
    "TokenLogprob",
    "Usage",
)
_HOMES = {
    "AsyncEngine": "radixrt.engine",
    "Engine": "radixrt.engine",
    "EngineConfig": "radixrt.config",
    **dict.fromkeys(("GrammarSpec", "StructuralTag"), "radixrt.constraints"),
    "OutputCollector": "radixrt.delivery",
    **dict.fromkeys(("CacheStats", "EngineStats", "HitCount"), "radixrt.metrics"),
    **dict.fromkeys(("CompileStats", "GrammarStats"), "radixrt.grammar.counters"),
    "Histogram": "radixrt.histogram",
    "Mailbox": "radixrt.mailbox",
    "PrefixReport": "radixrt.explain",
    "Scope": "radixrt.loop",
    **dict.fromkeys(("ChunkStream", "stream_chunks", "whole_output"), "radixrt.streams"),
    "Ticket": "radixrt.loop",
    "ToolForm": "radixrt.text.tool_forms",
    **dict.fromkeys(_ERRORS, "radixrt.errors"),
    **dict.fromkeys(_TYPES, "radixrt.types"),
}

__all__ = [
    "AsyncEngine",
    "CacheStats",
    "ChunkStream",
    "CompileStats",
    "DeadlineExceeded",
    "DeviceError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "ForcedSpan",
    "GenerateRequest",
    "GenerationOutput",
    "GrammarDeadEnd",
    "GrammarSpec",
    "GrammarStats",
    "GrammarTooCostly",
    "Histogram",
    "HitCount",
    "InvalidRequest",
    "InvariantViolation",
    "Mailbox",
    "ModelLoadError",
    "Namespace",
    "NeverFits",
    "Origin",
    "OutputChunk",
    "OutputCollector",
    "PrefixReport",
    "ProgramError",
    "PromptTooLong",
    "QueueFull",
    "RadixrtError",
    "RequestAborted",
    "RequestError",
    "Sample",
    "SamplingParams",
    "Scope",
    "StructuralTag",
    "TextPiece",
    "Ticket",
    "TokenLogprob",
    "ToolForm",
    "UnknownModel",
    "UnsupportedGrammar",
    "Usage",
    "__version__",
    "stream_chunks",
    "whole_output",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
