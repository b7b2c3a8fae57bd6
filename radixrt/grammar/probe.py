"""Try a constraint over a vocabulary of bytes."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec
from radixrt.errors import GrammarDeadEnd, GrammarTooCostly
from radixrt.grammar.compile import compile_for
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.text.tokenizer import Tokenizer
from radixrt.text.vocabulary import byte_alphabet

_END = "<|end|>"


@lru_cache(maxsize=1)
def byte_vocabulary() -> GrammarVocabulary:
    """Give a vocabulary of the 256 bytes and an end token."""
    return GrammarVocabulary(byte_tokenizer())


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer whose tokens are the 256 bytes and an end token."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={**byte_alphabet(), _END: 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={"eos_token": _END})


def probe(spec: GrammarSpec, config: GrammarConfig, *, num_masks: int) -> None:
    """Compile, then fill masks along a random walk.

    Raises:
        GrammarTooCostly: the engine gives up on the way.
        RequestError: what `radixrt.grammar.compile` raises.
    """
    vocabulary = byte_vocabulary()
    matcher = compile_for(spec, vocabulary, config).start()
    row = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    draw = random.Random(0)
    try:
        for _ in range(num_masks):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            if not allowed or not matcher.accept(draw.choice(allowed)):
                return
    except GrammarDeadEnd as error:
        raise GrammarTooCostly(f"the constraint is too complex: {error}", parameter="grammar") from None
