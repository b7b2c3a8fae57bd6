"""What many runs cost, call site by call site."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from frontend_lang.outcome import Err, Ok
from frontend_lang.trace import CallRecord, lined_up, num_forced, shown_count, total_usage

if TYPE_CHECKING:
    from frontend_lang.result import ProgramResult


def cache_table(results: Iterable[ProgramResult[Any] | Ok[Any] | Err]) -> str:
    """Give a plain-text table: for each call of the programs how many tokens came from the cache and how many did not.

    Args:
        results: of `run`, or the outcomes of `map`; failed ones are counted in the last line.
    """
    sites: dict[str, list[CallRecord]] = {}
    num_failed = 0
    for result in results:
        if isinstance(result, Err):
            num_failed += 1
            continue
        for call in (result.unwrap() if isinstance(result, Ok) else result).calls:
            sites.setdefault(call.label, []).append(call)
    rows = [_row(site, calls) for site, calls in sites.items()]
    rows.append(_row("total", [call for calls in sites.values() for call in calls]))
    text = lined_up(
        ("call", "times", "prompt", "cached", "share", "computed", "forced", "output"), rows, num_left=1
    )
    return text + (f"\n{num_failed} failed" if num_failed else "")


def _row(site: str, calls: list[CallRecord]) -> tuple[str, ...]:
    usage = total_usage([call.usage for call in calls])
    share = f"{usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else "-"
    counts = (usage.computed_tokens, num_forced(calls), usage.output_tokens)
    return (
        site,
        str(len(calls)),
        str(usage.prompt_tokens),
        str(usage.cached_tokens),
        share,
        *map(shown_count, counts),
    )
