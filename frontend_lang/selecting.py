"""What a select does: score its choices behind the transcript, and append the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from frontend_lang.backends import InvalidRequest, TextPiece, Usage
from frontend_lang.branch import Branch, Reply
from frontend_lang.calling import CallLog, within
from frontend_lang.events import TextDelta
from frontend_lang.nodes import Select, Step
from frontend_lang.selection import ScoredChoice, covering, distribution, leaves, winner
from frontend_lang.trace import total_usage


async def select(node: Select, step: Step, branch: Branch) -> Reply:
    """Append the choice that wins by the node's method, the first of equals."""
    run, transcript = branch.run, branch.transcript
    with CallLog("select", step, node.name, branch) as log:
        prefix_ids = transcript.token_ids()
        if not prefix_ids:
            raise InvalidRequest(
                "select needs a transcript to continue: put text before it", parameter="select"
            )
        log.fields["prompt_ids"] = prefix_ids
        sequences = [tuple(run.backend.encode([TextPiece(text)], is_start=False)) for text in node.choices]
        scored, usages = await score(node, branch, prefix_ids, sequences)
        if node.method == "unconditional_likelihood":
            bare, more = await score(node, branch, _bare_prefix(branch), sequences)
            scored = [
                replace(choice, unconditional=other.logprobs)
                for choice, other in zip(scored, bare, strict=True)
            ]
            usages += more
        best = winner(node.method, scored)
        transcript.add_generated(sequences[best], node.choices[best], call_index=log.index)
        if run.listener is not None:
            run.listener(TextDelta(branch.path, node.choices[best], node.name, is_generated=True))
        log.fields |= {
            "token_ids": sequences[best],
            "text": node.choices[best],
            "usage": total_usage(usages),
            "distribution": MappingProxyType(distribution(scored)),
        }
        return Reply(node.choices[best], log.close(), tuple(scored))


async def score(
    node: Select, branch: Branch, prefix_ids: Sequence[int], sequences: Sequence[tuple[int, ...]]
) -> tuple[list[ScoredChoice], list[Usage]]:
    """Score the leaves of the trie of choices behind a prefix; the others are beginnings of these."""
    run, chosen = branch.run, leaves(sequences)
    results = await within(
        run,
        node.limits,
        lambda: run.backend.score(
            prefix_ids,
            [sequences[index] for index in chosen],
            label=node.name or "",
            scope_id=branch.scope_id(),
        ),
    )
    choices = [
        ScoredChoice(text, ids, results[position].logprobs[: len(ids)])
        for text, ids, position in zip(node.choices, sequences, covering(sequences, chosen), strict=True)
    ]
    return choices, [result.usage for result in results]


def _bare_prefix(branch: Branch) -> tuple[int, ...]:
    """Give the shortest prefix: the begin of a sequence, or where a model has none, the end of another one."""
    backend = branch.run.backend
    prefix = backend.bos_ids or tuple(sorted(backend.eos_ids)[:1])
    if not prefix:
        raise InvalidRequest(
            "unconditional_likelihood needs a model with a token for the begin or end of a sequence",
            parameter="method",
        )
    return prefix
