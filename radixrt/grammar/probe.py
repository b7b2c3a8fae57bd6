"""Try a constraint over a vocabulary of bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from radixrt.constraints import GrammarSpec
from radixrt.errors import GrammarDeadEnd, GrammarTooCostly
from radixrt.grammar.compile import build
from radixrt.grammar.prepared import Prepared
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.text.tokenizer import Tokenizer
from radixrt.text.vocabulary import byte_alphabet

MAX_BUILD_S = 1.0  # of CPU time: the process that generates does this part again
_NUM_MASKS = 24
_END = "<|end of bytes|>"


@lru_cache(maxsize=8)
def byte_vocabulary(controls: tuple[str, ...] = ()) -> GrammarVocabulary:
    """Give a vocabulary of the 256 bytes, an end token and some control tokens."""
    return GrammarVocabulary(byte_tokenizer(controls))


def byte_tokenizer(controls: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer whose tokens are the 256 bytes, an end token and some control tokens."""
    names = {name: 256 + index for index, name in enumerate(dict.fromkeys((_END, *controls)))}
    backend = tokenizers.Tokenizer(models.BPE(vocab={**byte_alphabet(), **names}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(names))
    return Tokenizer(backend, special_tokens={"eos_token": _END})


def try_out(spec: GrammarSpec, prepared: Prepared) -> None:
    """Do what is left to do in the process that generates: build, then fill masks, along a random walk.

    Raises:
        GrammarTooCostly: the build takes longer than MAX_BUILD_S, or the engine gives up on the way.
        RequestError: what `build` raises.
    """
    vocabulary = byte_vocabulary(prepared.controls)
    started = time.process_time()
    grammar = build(spec, prepared, vocabulary)
    if (build_s := time.process_time() - started) > MAX_BUILD_S:
        raise GrammarTooCostly(
            f"the constraint takes the grammar engine {build_s:.1f} s to build, more than {MAX_BUILD_S:g} s",
            parameter="grammar",
        )
    matcher = grammar.start()
    row = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    draw = random.Random(0)
    try:
        for _ in range(_NUM_MASKS):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            if not allowed or not matcher.accept(draw.choice(allowed)):
                return
    except GrammarDeadEnd as error:
        raise GrammarTooCostly(f"the constraint is too complex: {error}", parameter="grammar") from None
