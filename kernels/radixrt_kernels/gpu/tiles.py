# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Device code that the attention kernels share: one tile of keys and values, one online softmax update.

Scores are kept in base 2 (exp2 is one instruction). Source of the online softmax: Milakov and Gimelshein,
arXiv:1805.02867; of its use in attention: FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def token_offsets(page_table, token, is_token, stride_page, PAGE: tl.constexpr, TOKEN: tl.constexpr):
    """Give the element offset of each token's keys, counted from its segment's first page; int64."""
    page = tl.load(page_table + token // PAGE, mask=is_token, other=0).to(tl.int64)
    return page * stride_page + (token % PAGE) * TOKEN


@triton.jit
def score_tile(queries, keys, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Give [M, N] scores in base 2 of [M, D] queries and [N, D] keys."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1, bounded for every x
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
    return scores * LOG2_E


@triton.jit
def softmax_update(scores, values, top, total, acc, MAY_BE_EMPTY: tl.constexpr):
    """Take a tile into (top, total, acc): the largest score, the sum of weights, the weighted values.

    MAY_BE_EMPTY: a row may have seen no key yet, so that its largest score is -inf.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    if MAY_BE_EMPTY:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        shift = new_top
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return new_top, total, acc
