"""Say why a token is in a mask or not."""

from __future__ import annotations

import numpy as np

from radixrt.grammar.matcher import GrammarMatcher, MaskExplanation
from radixrt.grammar.vocabulary import GrammarVocabulary

_NUM_ALTERNATIVES = 16


def explain(matcher: GrammarMatcher, vocabulary: GrammarVocabulary, token_id: int) -> MaskExplanation:
    """Explain one bit of the next mask. Cost: one mask, and one step per byte of the token."""
    row = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    token = vocabulary.vocab_bytes[token_id] if 0 <= token_id < len(vocabulary.vocab_bytes) else b""
    is_allowed = bool(0 <= token_id < len(bits) and bits[token_id])
    num_fitting = len(token) if is_allowed else _num_fitting(matcher, vocabulary, token)
    by_length = sorted(allowed.tolist(), key=lambda item: (len(vocabulary.shown(item)), item))
    return MaskExplanation(
        token_id=token_id,
        token_bytes=token,
        is_allowed=is_allowed,
        num_fitting_bytes=num_fitting,
        reason=_reason(matcher, vocabulary, token, is_allowed, num_fitting),
        num_allowed=len(allowed),
        allowed_bytes=tuple(map(vocabulary.shown, by_length[:_NUM_ALTERNATIVES])),
    )


def _num_fitting(matcher: GrammarMatcher, vocabulary: GrammarVocabulary, token: bytes) -> int:
    """Count the leading bytes that are allowed, by tokens of one byte."""
    cursor = matcher.fork()
    for index in range(len(token)):
        byte_id = vocabulary.byte_ids.get(token[index])
        if byte_id is None or not cursor.accept(byte_id):
            return index
    return len(token)


def _reason(
    matcher: GrammarMatcher, vocabulary: GrammarVocabulary, token: bytes, is_allowed: bool, num_fitting: int
) -> str:
    if is_allowed:
        return "the token may come next"
    if not token:
        return "the token has no text; ends of a sequence are counted outside the constraint"
    if matcher.is_terminated:
        return "the text is complete and nothing may follow"
    if forced := matcher.forced_tokens():
        text = b"".join(map(vocabulary.shown, forced))
        return f"only {text!r} can come next, in its canonical tokens"
    if num_fitting == len(token):
        return "its bytes may come next, but its tokens are not the canonical ones here"
    fitting = f"after {token[:num_fitting]!r} " if num_fitting else ""
    return f"{fitting}the byte {token[num_fitting : num_fitting + 1]!r} cannot come next"
