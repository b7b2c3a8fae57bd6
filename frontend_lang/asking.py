"""What a decide does: each question a short text behind the transcript, its answer one row of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from frontend_lang.backends import GenerateRequest, InvalidRequest, SamplingParams, TextPiece, Usage
from frontend_lang.branch import Branch, Reply
from frontend_lang.calling import CallLog, send, within
from frontend_lang.decisions import Decision, Question, decided, split_labels
from frontend_lang.nodes import Decide, Step
from frontend_lang.trace import total_usage
from frontend_lang.waiting import all_or_first_error

_LEAST = 1e-30  # probability that stands for none


async def decide(node: Decide[Any], step: Step, branch: Branch) -> Reply:
    """Ask all questions side by side; the transcript stays as it is, and its prefix is computed once."""
    with CallLog("decide", step, node.name, branch) as log:
        log.fields["prompt_ids"] = branch.transcript.token_ids()
        branch.transcript.mark(log.index)
        answers = await all_or_first_error(
            [ask(question, node, branch) for question in node.questions.values()]
        )
        decisions = {name: decision for name, (decision, _) in zip(node.questions, answers, strict=True)}
        log.fields["usage"] = total_usage([usage for _, usages in answers for usage in usages])
        return Reply(MappingProxyType(decisions), log.close())


async def ask(
    question: Question[Any], node: Decide[Any], branch: Branch
) -> tuple[Decision[Any], list[Usage]]:
    """Ask one question.

    Labels whose first tokens differ are told by one row of logits. Where one begins as another does, whole labels are
    scored.
    """
    prompt_ids, sequences = _prompt(question, branch)
    firsts = [sequence[:1] for sequence in sequences]
    if len(set(firsts)) < len(firsts) or () in firsts:
        return await _scored(question, node, branch, prompt_ids, sequences)
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=0,
        logprob_token_ids=tuple(token_id for (token_id,) in firsts),
        ignore_eos=True,
    )
    request = GenerateRequest(prompt_ids, sampling, label=node.name or "", scope_id=branch.scope_id())
    output = await send(request, branch.run, node.limits, lambda chunk: None)
    row = dict(output.logprobs[0].top) if output.logprobs else {}
    if not row.keys() >= set(sampling.logprob_token_ids):
        raise InvalidRequest("decide needs a runtime that gives log-probabilities", parameter="logprobs")
    return decided(question, [row[token_id] for token_id in sampling.logprob_token_ids]), [output.usage]


async def _scored(
    question: Question[Any],
    node: Decide[Any],
    branch: Branch,
    prompt_ids: tuple[int, ...],
    sequences: Sequence[tuple[int, ...]],
) -> tuple[Decision[Any], list[Usage]]:
    """Ask by the whole labels; one that others begin with counts as far as none of them goes on."""
    with_text = [sequence for sequence in sequences if sequence]
    rows, usages = await _rows(node, branch, prompt_ids, with_text)
    following: dict[tuple[int, ...], dict[int, float]] = {}
    for sequence, row in zip(with_text, rows, strict=True):
        for depth, token_id in enumerate(sequence):
            following.setdefault(sequence[:depth], {})[token_id] = row[depth]
    totals = {(): 0.0, **{sequence: math.fsum(row) for sequence, row in zip(with_text, rows, strict=True)}}

    def ends(sequence: tuple[int, ...]) -> float:
        goes_on = math.fsum(math.exp(logprob) for logprob in following.get(sequence, {}).values())
        return math.log(max(1.0 - goes_on, _LEAST)) if goes_on else 0.0

    return decided(question, [totals[sequence] + ends(sequence) for sequence in sequences]), usages


async def _rows(
    node: Decide[Any], branch: Branch, prompt_ids: tuple[int, ...], sequences: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[float, ...]], list[Usage]]:
    """Give the log-probabilities of each sequence's tokens."""
    backend = branch.run.backend
    scored = await within(
        branch.run,
        node.limits,
        lambda: backend.score(prompt_ids, sequences, label=node.name or "", scope_id=branch.scope_id()),
    )
    return [item.logprobs for item in scored], [item.usage for item in scored]


def _prompt(question: Question[Any], branch: Branch) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Give the ids up to where the labels differ, and what is left of each label.

    In a transcript of messages the question is the user's and the answer the assistant's.
    """
    transcript = branch.transcript.copy()
    if transcript.messages:
        transcript.open_role("user")
        transcript.add_text(question.text)
        transcript.open_role("assistant")
        space = ""
    else:
        transcript.add_text(f"\n\nQuestion: {question.text}\nAnswer:")
        space = " "
    common, rests = split_labels(
        [
            tuple(branch.run.backend.encode([TextPiece(space + label)], is_start=False))
            for label in question.labels
        ]
    )
    return (*transcript.token_ids(), *common), rests
