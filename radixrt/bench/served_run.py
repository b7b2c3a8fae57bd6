"""Open the arms of `radixrt bench workloads`, run them in turn and say on what."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixrt.bench.arms import EngineArm
from radixrt.bench.machines import processor_name
from radixrt.bench.peers import PeerArm
from radixrt.bench.prompts import SIZES, Prompts
from radixrt.bench.recorded import read_workload
from radixrt.bench.served import Arm, measure_works, works_of
from radixrt.engine import Engine
from radixrt.errors import InvalidRequest, suggest

OURS = "radixrt"


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, the Python that it is installed for and the model it is given."""

    name: str
    python: Path
    model: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is run.

    Attributes:
        options: of our engine, in every arm.
        arms: further options by arm.
        only: names of workloads; None = all.
        size: a key of SIZES.
    """

    options: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    peer: Peer | None
    only: Sequence[str] | None
    size: str
    num_repetitions: int
    agent_logs: Path | None


def compare(comparison: Comparison) -> dict[str, Any]:
    """Run the comparison; give plain JSON data with units in the names.

    Raises:
        InvalidRequest: an unknown workload, peer or option.
        EngineError: the peer ended.
    """
    with ExitStack() as stack:
        ours = EngineArm(comparison.options)
        stack.callback(ours.close)
        arms: dict[str, Arm] = {OURS: ours}
        about: dict[str, Any] = {}
        if (peer := comparison.peer) is not None:
            opened = PeerArm(
                peer.name, python=peer.python, model=peer.model, threads=ours.engine.config.num_threads
            )
            stack.callback(opened.close)
            arms[peer.name], about = opened, {"peer": peer.name, **opened.about}
        for name, further in comparison.arms.items():
            arms[name] = EngineArm({**comparison.options, **further})
            stack.callback(arms[name].close)
        agents = () if comparison.agent_logs is None else read_workload(comparison.agent_logs).requests
        works = works_of(_prompts(ours.engine), SIZES[comparison.size], agents=agents)
        chosen = {name: works[name] for name in _chosen(comparison.only, list(works))}
        measured = measure_works(arms, chosen, num_repetitions=comparison.num_repetitions, reference=OURS)
        return {
            "machine": {**_machine(ours.engine), **about},
            "size": comparison.size,
            "repetitions": comparison.num_repetitions,
            "workloads": measured,
        }


def _chosen(only: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    for name in only or ():
        if name not in known:
            raise InvalidRequest(
                f"only must be one of {', '.join(known)}, got {name!r}.{suggest(name, known)}",
                parameter="only",
            )
    return [name for name in known if only is None or name in only]


def _prompts(engine: Engine) -> Prompts:
    tokenizer = engine.tokenizer
    chat = tokenizer.chat

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def ask(text: str) -> list[int]:
        if chat is None:
            return encode(text + "\n")
        messages = [{"role": "user", "content": text}]
        return tokenizer.encode_pieces(chat.render(messages, add_generation_prompt=True))

    return Prompts(encode, chat=ask)


def _machine(engine: Engine) -> dict[str, Any]:
    config = engine.config
    dtype = str(config.dtype).removeprefix("torch.")
    text = (
        f"{config.options.model.model} in {dtype} on {processor_name()}, {config.num_threads} threads, kernels "
        f"{config.options.model.kernels}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return {"text": text, "model": config.options.model.model, "dtype": dtype, "threads": config.num_threads}
