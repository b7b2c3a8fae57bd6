"""The likeliest tokens without logits, under masks or not, are, to the bit, those that the logits give (src/rough.h)."""

import math
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER

from radixrt.config import home_folder
from radixrt.errors import GrammarDeadEnd
from radixrt.exec.batch import refusals
from radixrt.model.attention import cpu
from radixrt.model.outputs import likeliest
from tests.model.test_native import Pages, build, prompt
from tests.support.models import tiny_model
from tests.support.variants import VARIANT_NAMES

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

VOCAB_SIZE = 3021  # the last panel is not full; of fewer panels too many stay open, and searches end
COUNTS = (40, 1)  # rows of a step


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


def draw_mask(kind, num_token_ids, row):
    """Give one row's mask: what a grammar may allow, and bits after the last token, which say nothing."""
    rng = np.random.default_rng((num_token_ids, row))
    allowed = np.zeros(num_token_ids + -num_token_ids % 32, np.bool_)
    if kind == "most":
        allowed[:] = rng.random(len(allowed)) < 0.97
    elif kind == "some":
        allowed[:] = rng.random(len(allowed)) < 0.02
    elif kind == "panels":
        allowed[:] = np.repeat(rng.random(len(allowed) // 32) < 0.3, 32)
    elif kind == "one":
        allowed[int(rng.integers(num_token_ids))] = True
    allowed[num_token_ids:] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def draw_masks(num_rows, num_token_ids):
    """Give masks of all kinds, and rows without one."""
    kinds = (None, "most", "some", "panels", "one", "none")
    return [
        None
        if (kind := kinds[(row + num_rows) % len(kinds)]) is None
        else draw_mask(kind, num_token_ids, row)
        for row in range(num_rows)
    ]


def expected(logits, masks):
    """Give what the masked logits say: infinity less infinity is no number, here as in the sampler."""
    values = logits.clone()
    for row, mask in enumerate(masks):
        if mask is not None:
            values[row] += refusals(mask, values.shape[1])
    return likeliest(values)


def assert_found(found, token_ids, largest):
    rows = zip(token_ids, largest, found.token_ids, found.largest, strict=True)
    for token_id, value, found_id, found_value in rows:
        if math.isnan(value):
            assert math.isnan(found_value)
        else:
            assert (found_id, found_value) == (token_id, value)


def assert_same(folder, **options):
    """Compute steps with and without logits and masks, for several numbers of rows and of tokens that can be drawn."""
    decoder = build(folder, **options)
    for count in COUNTS:
        for num_token_ids in (VOCAB_SIZE, 705):
            pages = Pages(decoder, page_size=4)
            inputs = pages.inputs({"a": prompt(count)})

            def predict(inputs=inputs, pages=pages, num_token_ids=num_token_ids, **options):
                return decoder.predict(inputs, pages.store, num_token_ids=num_token_ids, **options)

            known = predict()
            assert_found(known, *likeliest(known.logits[:, :num_token_ids]))
            found = predict(wants_logits=False)
            assert found.logits is None
            assert_found(found, known.token_ids, known.largest)
            masks = draw_masks(count, num_token_ids)
            allowed = expected(known.logits[:, :num_token_ids], masks)
            assert_found(predict(get_masks=lambda masks=masks: masks), *allowed)
            assert_found(predict(wants_logits=False, get_masks=lambda masks=masks: masks), *allowed)


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


def test_masks_are_asked_for_once_and_their_error_reaches_the_caller(tmp_path):
    decoder = build(tiny_model("llama", tmp_path, hidden_size=96, vocab_size=VOCAB_SIZE))
    pages = Pages(decoder, page_size=4)
    inputs = pages.inputs({"a": prompt(3)})
    calls = []

    def predict(masks):
        def get_masks():
            calls.append(threading.get_ident())
            if isinstance(masks, BaseException):
                raise masks
            return masks

        return decoder.predict(inputs, pages.store, num_token_ids=VOCAB_SIZE, get_masks=get_masks)

    known = predict([None] * 3)
    assert calls == [threading.get_ident()]
    for error in (GrammarDeadEnd("no mask"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            predict(error)
        assert raised.value is error
    num_words = -(-VOCAB_SIZE // 32)
    for mask in (
        np.ones(num_words, np.int64),
        np.ones(num_words - 1, np.int32),
        np.ones((num_words, 1), np.int32),
        np.ones(2 * num_words, np.int32)[::2],
    ):
        with pytest.raises(ValueError, match=rf"a mask must be \[{num_words}\] int32, contiguous, got"):
            predict([None, None, mask])
    with pytest.raises(ValueError, match="there must be 3 masks, got 2"):
        predict([None] * 2)
    assert predict([None] * 3)[1:] == known[1:]


# An exception at the callback's first instruction, where those of signals arrive that came beside the layers.
CUT_SHORT = """
import sys
from pathlib import Path

from tests.model.test_native import Pages, build, prompt

decoder = build(Path(sys.argv[1]))
pages = Pages(decoder, page_size=4)
inputs = pages.inputs({"a": prompt(3)})

def trace(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "_call" and "masks" in frame.f_code.co_filename:
        raise KeyboardInterrupt

def predict(masks):
    return decoder.predict(inputs, pages.store, num_token_ids=8, wants_logits=False, get_masks=lambda: masks)

sys.settrace(trace)
try:
    predict([None] * 3)
except RuntimeError as error:
    sys.settrace(None)
    print(error, len(predict([None] * 3).token_ids))
"""


def test_a_call_for_masks_that_is_cut_short_ends_the_step(tmp_path):
    folder = tiny_model("llama", tmp_path / "tiny")
    run = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    told = "the call for masks was cut short; what cut it was told on the error stream 3"
    assert (run.returncode, run.stdout.strip()) == (0, told), run.stderr[-500:]
    assert "KeyboardInterrupt" in run.stderr


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
    if variant in ("avx512_fp16", "avx512_bf16"):
        assert library.rough_sizes(weight) == (2 * 32 * 8, 2 * 32 * 12)
        assert library.rough_sizes(torch.zeros(1, 65_552)) == (0, 0)
    else:
        assert library.rough_sizes(weight) == (0, 0)
        with pytest.raises(ValueError, match=f"the variant {variant} has no rough products with 18 inputs"):
            library.pack_rough(weight, torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.uint8))
