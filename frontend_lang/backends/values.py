"""The values of a call that programs and backends hand each other: radixrt's own, under one roof."""

from radixrt import (
    DeadlineExceeded,
    DeviceError,
    EngineError,
    EngineStopped,
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    GrammarDeadEnd,
    GrammarSpec,
    GrammarTooCostly,
    InvalidRequest,
    NeverFits,
    OutputChunk,
    OutputCollector,
    ProgramError,
    PromptTooLong,
    QueueFull,
    RadixrtError,
    RequestAborted,
    RequestError,
    Sample,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    UnknownModel,
    UnsupportedGrammar,
    Usage,
)

__all__ = [
    "ERRORS",
    "DeadlineExceeded",
    "EngineError",
    "FinishReason",
    "GenerateRequest",
    "GenerationOutput",
    "GrammarSpec",
    "InvalidRequest",
    "OutputChunk",
    "OutputCollector",
    "ProgramError",
    "RadixrtError",
    "RequestAborted",
    "RequestError",
    "Sample",
    "SamplingParams",
    "TextPiece",
    "TokenLogprob",
    "Usage",
]

# What a runtime says when a call fails, by name.
ERRORS: dict[str, type[RadixrtError]] = {
    kind.__name__: kind
    for kind in (
        DeadlineExceeded,
        DeviceError,
        EngineError,
        EngineStopped,
        GrammarDeadEnd,
        GrammarTooCostly,
        InvalidRequest,
        NeverFits,
        PromptTooLong,
        QueueFull,
        RequestAborted,
        RequestError,
        UnknownModel,
        UnsupportedGrammar,
    )
}
