"""What a gen does: one request, and its text as the transcript's next piece and as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend_lang.backends import FinishReason, GenerateRequest, GenerationOutput, SamplingParams, Usage
from frontend_lang.branch import Branch, Reply
from frontend_lang.calling import CallLog, Teller, send
from frontend_lang.nodes import Gen, Step
from frontend_lang.transcript import NOT_HEALED, Healed
from frontend_lang.values import healed_grammar


async def gen(node: Gen[Any], step: Step, branch: Branch) -> Reply:
    """Let the model continue the transcript, and append what it wrote; with n > 1 the first of it."""
    run, transcript = branch.run, branch.transcript
    with CallLog("gen", step, node.name, branch) as log:
        healed = transcript.heal() if node.is_healed else NOT_HEALED
        prompt_ids = transcript.token_ids()
        log.fields["prompt_ids"] = prompt_ids
        sampling = run.sampling_of(node, healed_grammar(node.grammar, healed.text))
        request = GenerateRequest(prompt_ids, sampling, label=node.name or "", scope_id=branch.scope_id())
        output = await send(request, run, node.limits, Teller(branch, step, num_hidden=len(healed.text)))
        if step.samples:
            _settle_samples(step, branch, log, sampling, healed, output)
        written = transcript.add_sample(output.samples[0], sampling, healed, log.index)
        if step.samples:
            return Reply(step.value, log.record)
        log.fields |= {**written, "usage": output.usage, "queued_s": output.queued_s}
        return Reply(value_of(node, log), log.close())


def _settle_samples(
    step: Step,
    branch: Branch,
    log: CallLog,
    sampling: SamplingParams,
    healed: Healed,
    output: GenerationOutput,
) -> None:
    """Give each sample's branch its text and its value, or the failure to make one.

    The call's own record is that of the first sample and has the usage of the whole request.
    """
    node = step.node
    assert isinstance(node, Gen)
    fork([child for child, _ in step.samples], branch)
    for index, (child, variable) in enumerate(step.samples):
        own = log if index == 0 else CallLog("gen", step, node.name, child)
        own.fields |= {
            "prompt_ids": output.prompt_ids,
            "usage": output.usage if index == 0 else Usage(),
            "queued_s": output.queued_s,
        }
        own.fields |= child.transcript.add_sample(output.samples[index], sampling, healed, own.index)
        try:
            child.set(node.name, variable, Reply(value_of(node, own), own.close()))
        except ValueError as error:
            own.fail(error)
            failure = child.failure_at(step, error)
            branch.run.untold.append(failure)
            variable.set_result(failure)
            child.fail(failure)


def value_of(node: Gen[Any], log: CallLog) -> Any:
    """Make the value of a call's text.

    Raises:
        ValueError: the text does not fit the schema.
    """
    text = log.fields["text"]
    if node.reader is None:
        return text
    try:
        return node.reader.read(text)
    except ValueError as error:
        if log.fields["finish_reason"] is not FinishReason.LENGTH:
            raise
        num_tokens = len(log.fields["token_ids"])
        raise ValueError(f"the value was cut off after {num_tokens} tokens (max_tokens)") from error


def fork(children: Sequence[Branch], branch: Branch) -> None:
    """Give each child a copy of the transcript, encoded, so that all share the exact prefix."""
    branch.transcript.token_ids()
    for child in children:
        child.release(branch.transcript.copy())
