"""Write LLM programs as plain Python functions.

from frontend_lang import assistant, gen, program, set_default_engine, system, user

@program
def answer(s, question):
    s += system("You are a helpful assistant.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=64))

result = answer.run(question="What is a radix tree?")
print(result["answer"])

A call is the typed handle of its value (`person = gen(schema=Person)`, then `s[person]`); `answer.map` runs many,
`answer.stream` tells what happens, `answer.with_options` chooses engine, sampling and limits.
"""

from frontend_lang.aliases import (
    assistant_begin,
    assistant_end,
    flush_cache,
    gen_int,
    gen_string,
    image,
    separate_reasoning,
    system_begin,
    system_end,
    user_begin,
    user_end,
    video,
)
from frontend_lang.backends import (
    Backend,
    DryBackend,
    DryRunEnds,
    EngineBackend,
    HttpBackend,
    NotRecorded,
    OpenAIBackend,
    ProgramError,
    Recording,
    RecordingBackend,
    RemoteError,
    RemoteUnavailable,
    ReplayBackend,
    ScoredContinuation,
)
from frontend_lang.builders import assistant, control, decide, gen, role, select, system, user
from frontend_lang.decisions import Decision, Question, choice, predicate, score
from frontend_lang.events import CallDone, Event, ProgramDone, TextDelta, VariableSet
from frontend_lang.limits import BudgetExceeded, Retry
from frontend_lang.nodes import Call
from frontend_lang.outcome import Err, Ok, Outcome, Outcomes
from frontend_lang.program import (
    Program,
    function,
    program,
    set_default_backend,
    set_default_engine,
)
from frontend_lang.result import ProgramResult
from frontend_lang.selection import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from frontend_lang.state import Branches, State
from frontend_lang.streaming import AsyncProgramStream, ProgramStream
from frontend_lang.tools import ToolAnswer, ToolCall, ToolFormat, describe_tools
from frontend_lang.trace import CallRecord
from frontend_lang.traces import DryRun, Trace, cache_table
from frontend_lang.voting import Vote, best_of, mean_logprob, vote

__all__ = [
    "AsyncProgramStream",
    "Backend",
    "Branches",
    "BudgetExceeded",
    "Call",
    "CallDone",
    "CallRecord",
    "Decision",
    "DryBackend",
    "DryRun",
    "DryRunEnds",
    "EngineBackend",
    "Err",
    "Event",
    "HttpBackend",
    "NotRecorded",
    "Ok",
    "OpenAIBackend",
    "Outcome",
    "Outcomes",
    "Program",
    "ProgramDone",
    "ProgramError",
    "ProgramResult",
    "ProgramStream",
    "Question",
    "Recording",
    "RecordingBackend",
    "RemoteError",
    "RemoteUnavailable",
    "ReplayBackend",
    "Retry",
    "ScoredContinuation",
    "State",
    "TextDelta",
    "ToolAnswer",
    "ToolCall",
    "ToolFormat",
    "Trace",
    "VariableSet",
    "Vote",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "best_of",
    "cache_table",
    "choice",
    "control",
    "decide",
    "describe_tools",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "image",
    "mean_logprob",
    "predicate",
    "program",
    "role",
    "score",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "set_default_engine",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
    "vote",
]
