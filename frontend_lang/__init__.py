"""Write LLM programs as plain Python functions.

from frontend_lang import assistant, gen, program, set_default_engine, system, user

@program
def answer(s, question):
    s += system("You are a helpful assistant.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=64))

result = answer.run(question="What is a radix tree?")
print(result["answer"])
"""

from frontend_lang.backends import Backend, EngineBackend, ProgramError, ScoredContinuation
from frontend_lang.builders import assistant, control, gen, role, select, system, user
from frontend_lang.outcome import Err, Ok, Outcome, Outcomes
from frontend_lang.program import (
    Program,
    ProgramResult,
    function,
    program,
    set_default_backend,
    set_default_engine,
)
from frontend_lang.state import Branches, State
from frontend_lang.trace import CallRecord

__all__ = [
    "Backend",
    "Branches",
    "CallRecord",
    "EngineBackend",
    "Err",
    "Ok",
    "Outcome",
    "Outcomes",
    "Program",
    "ProgramError",
    "ProgramResult",
    "ScoredContinuation",
    "State",
    "assistant",
    "control",
    "function",
    "gen",
    "program",
    "role",
    "select",
    "set_default_backend",
    "set_default_engine",
    "system",
    "user",
]
