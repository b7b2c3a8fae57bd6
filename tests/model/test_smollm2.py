"""The small default model, token for token against transformers in float32."""

import itertools
from array import array

import pytest
import torch

from radixrt.config import DEFAULT_MODEL, home_folder
from radixrt.kv.store import KVStore
from radixrt.model.catalog import load_tokenizer, resolve
from radixrt.model.inputs import BatchInputs
from radixrt.model.loader import load_model
from tests.support.models import oracle

pytestmark = pytest.mark.model

PAGE_SIZE = 16
NUM_NEW_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    '{"name": "Ada", "born": 1815, "field":',
    "Water boils at",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Der schnelle braune Fuchs springt über",
)


def greedy_by_pages(decoder, prompts):
    """Continue all prompts together: one mixed prefill, then decodes."""
    num_pages = [-(-(len(ids) + NUM_NEW_TOKENS) // PAGE_SIZE) for ids in prompts]
    layout = decoder.spec.kv_layout(page_size=PAGE_SIZE, dtype=decoder.dtype)
    store = KVStore(layout, num_pages=1 + sum(num_pages), device=torch.device("cpu"))
    free = iter(range(1, store.num_pages))
    pages = [[next(free) for _ in range(count)] for count in num_pages]
    page_table = [page for own in pages for page in (*own, *[0] * (max(num_pages) - len(own)))]
    sequences = [list(ids) for ids in prompts]
    computed = [0] * len(prompts)
    for _ in range(NUM_NEW_TOKENS):
        new = [len(ids) - start for ids, start in zip(sequences, computed, strict=True)]
        spans = [range(start, len(ids)) for ids, start in zip(sequences, computed, strict=True)]
        ends = list(itertools.accumulate(new, initial=0))
        inputs = BatchInputs(
            token_ids=array("q", [i for b, ids in enumerate(sequences) for i in ids[computed[b] :]]),
            positions=array("q", itertools.chain(*spans)),
            slots=array(
                "q",
                [
                    pages[b][i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
                    for b, at in enumerate(spans)
                    for i in at
                ],
            ),
            page_table=array("i", page_table),
            query_start=array("i", ends),
            context_lens=array("i", map(len, sequences)),
            sample_rows=array("q", [end - 1 for end in ends[1:]]),
        )
        computed = [len(ids) for ids in sequences]
        found = decoder.predict(inputs, store, num_token_ids=decoder.spec.vocab_size)
        for ids, token_id in zip(sequences, found.token_ids, strict=True):
            ids.append(token_id)
    return sequences


def likeliest_next(model, ids):
    """Give the likeliest token after every position of ids, by the plain forward."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].argmax(-1).tolist()


def test_greedy_tokens_equal_transformers():
    folder = resolve(DEFAULT_MODEL, home=home_folder())
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    decoder = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    found = greedy_by_pages(decoder, prompts)
    model = oracle(folder)
    for ids, sequence in zip(prompts, found, strict=True):
        # Each new token is the likeliest after all before it: the same as generating them one by one.
        assert sequence[len(ids) :] == likeliest_next(model, sequence)[len(ids) - 1 : -1]
    assert "Paris" in tokenizer.decode(found[0])
