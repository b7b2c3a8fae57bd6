"""What a run did, as data: made of a run, printed, shown in a browser, saved and replayed.

| module | what |
|---|---|
| `model` | `Trace` and its branches: frozen data, saved as JSON |
| `seen` | what is kept of a run so that a trace can be made of it |
| `tree` | the order in which text, calls and forks stand in a branch |
| `soundness` | whether the parts of a loaded trace fit together |
| `text`, `page` | the tree as plain text; as one self-contained HTML page |
| `summary` | `cache_table`: what many runs cost |
| `dry` | `DryRun`: the prompts of a program that sent nothing |
"""

from frontend_lang.traces.dry import DryPrompt, DryRun, dry_run_of
from frontend_lang.traces.model import Trace, TracedBranch, TracedRun
from frontend_lang.traces.seen import Seen, see
from frontend_lang.traces.summary import cache_table

__all__ = [
    "DryPrompt",
    "DryRun",
    "Seen",
    "Trace",
    "TracedBranch",
    "TracedRun",
    "cache_table",
    "dry_run_of",
    "see",
]
