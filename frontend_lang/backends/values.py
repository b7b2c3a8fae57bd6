"""The values of a call that programs and backends hand each other: radixrt's own, under one roof."""

from radixrt import (
    DeadlineExceeded,
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    GrammarSpec,
    InvalidRequest,
    OutputChunk,
    OutputCollector,
    ProgramError,
    RequestAborted,
    Sample,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    Usage,
)

__all__ = [
    "DeadlineExceeded",
    "FinishReason",
    "GenerateRequest",
    "GenerationOutput",
    "GrammarSpec",
    "InvalidRequest",
    "OutputChunk",
    "OutputCollector",
    "ProgramError",
    "RequestAborted",
    "Sample",
    "SamplingParams",
    "TextPiece",
    "TokenLogprob",
    "Usage",
]
