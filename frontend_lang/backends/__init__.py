"""Where a program's calls go: the protocol, the values that travel, and the runtimes that answer.

| module | what |
|---|---|
| `values` | radixrt's data types; with `engine` and `local_text` the only importer of radixrt |
| `protocol` | `Backend`: what a program needs of a runtime |
| `engine` | `EngineBackend`: an engine in this process, token-exact |
| `http`, `remote`, `remote_scopes` | `HttpBackend`: a radixrt server, token-exact |
| `openai`, `chat_text`, `chat_answer` | `OpenAIBackend`: any server that speaks the OpenAI chat protocol |
| `recording`, `replay` | `RecordingBackend` keeps what another one was asked and said; `ReplayBackend` answers from it |
| `local_text`, `gathering` | what several of them share |
| `dry` | `DryBackend`: sends nothing, answers with stand-ins |
"""

from frontend_lang.backends.dry import DryBackend, DryRunEnds
from frontend_lang.backends.engine import EngineBackend, RuntimeEngine
from frontend_lang.backends.http import HttpBackend
from frontend_lang.backends.openai import OpenAIBackend
from frontend_lang.backends.protocol import Backend, ScoredContinuation, call_site
from frontend_lang.backends.recording import RecordedCall, Recording, RecordingBackend
from frontend_lang.backends.remote import RemoteError, RemoteUnavailable
from frontend_lang.backends.replay import NotRecorded, ReplayBackend
from frontend_lang.backends.values import (
    DeadlineExceeded,
    FinishReason,
    ForcedSpan,
    GenerateRequest,
    GenerationOutput,
    GrammarSpec,
    InvalidRequest,
    Origin,
    OutputChunk,
    OutputCollector,
    ProgramError,
    RequestAborted,
    Sample,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    ToolForm,
    Usage,
)

__all__ = [
    "Backend",
    "DeadlineExceeded",
    "DryBackend",
    "DryRunEnds",
    "EngineBackend",
    "FinishReason",
    "ForcedSpan",
    "GenerateRequest",
    "GenerationOutput",
    "GrammarSpec",
    "HttpBackend",
    "InvalidRequest",
    "NotRecorded",
    "OpenAIBackend",
    "Origin",
    "OutputChunk",
    "OutputCollector",
    "ProgramError",
    "RecordedCall",
    "Recording",
    "RecordingBackend",
    "RemoteError",
    "RemoteUnavailable",
    "ReplayBackend",
    "RequestAborted",
    "RuntimeEngine",
    "Sample",
    "SamplingParams",
    "ScoredContinuation",
    "TextPiece",
    "TokenLogprob",
    "ToolForm",
    "Usage",
    "call_site",
]
