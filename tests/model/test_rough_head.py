"""The likeliest tokens without logits are, to the bit, those that the logits give (src/rough.h)."""

import math
import shutil

import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER

from radixrt.config import home_folder
from radixrt.model.attention import cpu
from tests.model.test_native import Pages, build, prompt
from tests.support.models import tiny_model
from tests.support.variants import VARIANT_NAMES

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

VOCAB_SIZE = 1357  # the last panel is not full
COUNTS = (1, 40)  # rows of a step


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(head):
    """All rows are one but for the last bits of some weights."""
    return head[:1] * (1 + 0.004 * draw(*head.shape, seed=2).sign() * (draw(*head.shape, seed=3) > 1.5))


def lopsided(head):
    """One weight of every row dwarfs the others."""
    head = head.clone()
    head[torch.arange(len(head)), torch.arange(len(head)) % head.shape[1]] *= 200
    return head


def whole(head):
    """Bytes are exact: only inputs are rounded."""
    head = (head * 40).round().clamp(-127, 127)
    head[:, 0] = 127
    return head


def mixed(head):
    """Rows of all sizes, from nothing to what overflows."""
    order = torch.randperm(len(head), generator=torch.Generator().manual_seed(4))
    return head * 10 ** torch.linspace(-45, 38, len(head))[order][:, None]


def broken(value, head):
    head = head.clone()
    head[700, 3] = value
    return head


HEADS = {
    "random": lambda head: head,
    "near": near,
    "repeated": lambda head: head[torch.arange(len(head)) % 7],
    "zero": torch.zeros_like,
    "negative": lambda head: -head.abs(),
    "lopsided": lopsided,
    "whole": whole,
    "mixed": mixed,
    "tiny": lambda head: head * 1e-38,
    "huge": lambda head: head * 1e37,
    "nan": lambda head: broken(float("nan"), head),
    "inf": lambda head: broken(float("inf"), head),
}
NORMS = {
    "ones": lambda norm: torch.ones_like(norm),
    "one large input": lambda norm: torch.where(torch.arange(len(norm)) == 5, 300.0, 1.0),
    "no input": torch.zeros_like,
    "small inputs": lambda norm: torch.full_like(norm, 1e-24),
    "tiny inputs": lambda norm: torch.full_like(norm, 1e-38),
    "huge inputs": lambda norm: torch.full_like(norm, 3e37),
    "nan": lambda norm: torch.where(torch.arange(len(norm)) == 5, float("nan"), 1.0),
}


def assert_same(folder, **options):
    """Compute steps with and without logits, for several numbers of rows and of tokens that can be drawn."""
    decoder = build(folder, **options)
    for count in COUNTS:
        for num_token_ids in (VOCAB_SIZE, 705):
            pages = Pages(decoder, page_size=4)
            inputs = pages.inputs({"a": prompt(count)})
            known, found = (
                decoder.predict(inputs, pages.store, num_token_ids=num_token_ids, wants_logits=wants_logits)
                for wants_logits in (True, False)
            )
            assert found.logits is None
            rows = zip(known.token_ids, known.largest, found.token_ids, found.largest, strict=True)
            for token_id, largest, found_id, found_largest in rows:
                if math.isnan(largest):
                    assert math.isnan(found_largest)
                else:
                    assert (found_id, found_largest) == (token_id, largest)


@pytest.mark.parametrize(
    ("variant", "head"),
    [(None, head) for head in HEADS]
    + [(variant, head) for variant in VARIANT_NAMES for head in ("repeated", "nan")],
)
def test_no_weights_change_the_likeliest_token(tmp_path, variant, head):
    folder = tiny_model("llama", tmp_path, hidden_size=96, vocab_size=VOCAB_SIZE)
    weights = HEADS[head](draw(VOCAB_SIZE, 96)).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(folder, dtype=dtype, variant=variant, num_threads=3, head=weights.to(dtype))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "hidden_size", [96, 60, 44]
)  # steps of four inputs, and of four of these, are filled up
def test_no_inputs_change_the_likeliest_token(tmp_path, hidden_size, norm):
    folder = tiny_model("llama", tmp_path, hidden_size=hidden_size, head_dim=16, vocab_size=VOCAB_SIZE)
    head = draw(VOCAB_SIZE, hidden_size)
    for dtype in (torch.float32, torch.bfloat16):
        final_norm = NORMS[norm](torch.ones(hidden_size)).to(dtype)
        assert_same(folder, dtype=dtype, num_threads=1, head=head.to(dtype), final_norm=final_norm)


def test_products_that_underflow_do_not_change_the_likeliest_token(tmp_path):
    folder = tiny_model("llama", tmp_path, hidden_size=96, vocab_size=VOCAB_SIZE)
    final_norm = torch.full((96,), 1e-9)
    for size in (1e-27, 1e-29, 1e-31):
        head = draw(VOCAB_SIZE, 96) * size
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(folder, dtype=dtype, head=head.to(dtype), final_norm=final_norm.to(dtype))


def test_searches_in_vain_stop_and_begin_again(tmp_path):
    folder = tiny_model("llama", tmp_path, hidden_size=96, vocab_size=VOCAB_SIZE)
    decoder = build(folder, head=HEADS["repeated"](draw(VOCAB_SIZE, 96)).contiguous())
    pages = Pages(decoder, page_size=4)
    inputs = pages.inputs({"a": prompt(3)})
    known = decoder.predict(inputs, pages.store, num_token_ids=VOCAB_SIZE)
    for _ in range(150):
        found = decoder.predict(inputs, pages.store, num_token_ids=VOCAB_SIZE, wants_logits=False)
        assert found[1:] == known[1:]


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_variants_with_products_of_bytes_search(variant):
    library = cpu.load_library(home_folder() / "build", variant=variant)
    weight = torch.zeros(33, 18)
    if variant == "avx512_bf16":
        assert library.rough_sizes(weight) == (2 * 32 * 8, 2 * 32 * 12)
        assert library.rough_sizes(torch.zeros(1, 65_552)) == (0, 0)
    else:
        assert library.rough_sizes(weight) == (0, 0)
        with pytest.raises(ValueError, match=f"the variant {variant} has no rough products with 18 inputs"):
            library.pack_rough(weight, torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.uint8))
