"""The decoder over pages against the plain transformers forward."""

import itertools
from array import array

import pytest
import torch

from radixrt.errors import ModelLoadError
from radixrt.kv.store import KVStore
from radixrt.model.inputs import BatchInputs
from radixrt.model.loader import load_model
from tests.support.models import oracle, tiny_model

CPU = torch.device("cpu")
KINDS = ["llama", "mistral", "qwen2", "qwen3"]
PAGE_SIZES = [1, 4, 16]
# float32 sums of some hundred terms in another order, on logits of order 10
TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": YARN,
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "truncate": False},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


class Pages:
    """Hand out scattered pages to sequences and run steps of (sequence, tokens up to `stop`)."""

    def __init__(self, decoder, *, page_size, num_pages=256, seed=0):
        self.decoder = decoder
        self.page_size = page_size
        layout = decoder.spec.kv_layout(page_size=page_size, dtype=decoder.dtype)
        self.store = KVStore(layout, num_pages=num_pages, device=CPU)
        self.store.data.fill_(float("nan"))
        order = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
        self.free = order.tolist()
        self.pages = {}
        self.computed = {}

    def step(self, chunks, *, rows=None):
        """Run one step.

        Args:
            chunks: {name: all token ids up to the end of this chunk}.
            rows: rows of logits to give; default: all.
        """
        tokens, positions, slots, new, context = [], [], [], [], []
        for name, ids in chunks.items():
            start = self.computed.get(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.page_size < len(ids):
                pages.append(self.free.pop())
            span = range(start, len(ids))
            tokens += ids[start:]
            positions += span
            slots += [pages[i // self.page_size] * self.page_size + i % self.page_size for i in span]
            new.append(len(span))
            context.append(len(ids))
            self.computed[name] = len(ids)
        width = max(len(self.pages[name]) for name in chunks) + 1
        table = [self.pages[name] + [0] * (width - len(self.pages[name])) for name in chunks]
        inputs = BatchInputs(
            token_ids=array("q", tokens),
            positions=array("q", positions),
            slots=array("q", slots),
            page_table=array("i", itertools.chain(*table)),
            query_start=array("i", itertools.accumulate(new, initial=0)),
            context_lens=array("i", context),
            sample_rows=array("q", range(len(tokens)) if rows is None else rows),
        )
        return self.decoder.forward(inputs, self.store)

    def share(self, source, target, num_tokens):
        """Let `target` begin with `source`'s pages of its first num_tokens, a multiple of the page size."""
        assert num_tokens % self.page_size == 0
        self.pages[target] = self.pages[source][: num_tokens // self.page_size]
        self.computed[target] = num_tokens


def prompt(num_tokens, *, seed=0):
    return torch.randint(0, 259, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_mixed_batch_equals_plain_forward(folder, page_size):
    model = oracle(folder)
    pages = Pages(load_model(folder, device=CPU, dtype=torch.float32), page_size=page_size)
    long, shared = prompt(70, seed=1), prompt(32, seed=2)
    branch = shared + prompt(9, seed=3)
    decodes = {f"decode{n}": prompt(n, seed=n) for n in (2, 16, 17, 45)}
    pages.step({"long": long[:33], "shared": shared, **{name: ids[:-1] for name, ids in decodes.items()}})
    pages.share("shared", "branch", 32)

    fresh = prompt(21, seed=4)
    chunks = {**decodes, "fresh": fresh, "branch": branch, "long": long[:66]}
    logits = pages.step(chunks)

    expected = [plain_logits(model, ids)[-1:] for ids in decodes.values()]
    expected += [
        plain_logits(model, fresh),
        plain_logits(model, branch)[32:],
        plain_logits(model, long)[33:66],
    ]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_equal_plain_forward(folder, page_size):
    model = oracle(folder)
    pages = Pages(load_model(folder, device=CPU, dtype=torch.float32), page_size=page_size)
    sequences = {f"s{n}": prompt(n, seed=n) for n in (1, 7, 16, 30)}
    expected = {}
    for name, ids in sequences.items():
        tokens = list(ids)
        for _ in range(32):
            tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
        expected[name] = tokens
    ends = torch.tensor([len(ids) for ids in sequences.values()]).cumsum(0) - 1
    for i in range(32):
        rows = ends.tolist() if i == 0 else range(len(sequences))
        logits = pages.step(sequences, rows=list(rows))
        for name, token_id in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequences[name] = [*sequences[name], token_id]
    assert sequences == expected


@pytest.mark.parametrize("rope", ROPES)
def test_rope_types_equal_plain_forward(tmp_path, rope):
    folder = tiny_model("llama", tmp_path, rope_parameters=ROPES[rope], max_position_embeddings=256)
    check_prefill_and_decode(folder)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_head_may_be_tied(tmp_path, kind, is_tied):
    folder = tiny_model(kind, tmp_path, tie_word_embeddings=is_tied)
    decoder = load_model(folder, device=CPU, dtype=torch.float32)
    assert (decoder.weights.head is decoder.weights.embedding) == is_tied
    check_prefill_and_decode(folder)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 24}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    ],
)
def test_options_of_a_family_equal_plain_forward(tmp_path, kind, overrides):
    check_prefill_and_decode(tiny_model(kind, tmp_path, **overrides))


def check_prefill_and_decode(folder):
    """Compare a prompt of 60, an extension by 20 and a decode with the plain forward."""
    pages = Pages(load_model(folder, device=CPU, dtype=torch.float32), page_size=4)
    ids = prompt(81)
    parts = [pages.step({"a": ids[:stop]}) for stop in (60, 80, 81)]
    torch.testing.assert_close(torch.cat(parts), plain_logits(oracle(folder), ids), atol=TOLERANCE, rtol=0)


def test_only_wanted_rows_are_given(folder):
    decoder = load_model(folder, device=CPU, dtype=torch.float32)
    ids = prompt(12)
    everything = Pages(decoder, page_size=4).step({"a": ids})
    some = Pages(decoder, page_size=4).step({"a": ids}, rows=[11, 3])
    # A matrix product of two rows may add up in another order.
    torch.testing.assert_close(some, everything[[11, 3]], atol=1e-5, rtol=1e-5)
    assert Pages(decoder, page_size=4).step({"a": ids}, rows=[]).shape == (0, decoder.spec.vocab_size)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(folder):
    ids = prompt(60)
    decoder = load_model(folder, device=CPU, dtype=torch.bfloat16)
    logits = Pages(decoder, page_size=4).step({"a": ids})
    expected = plain_logits(oracle(folder), ids)
    their_logits = plain_logits(oracle(folder).bfloat16(), ids).float()
    error, their_error = ((x - expected).square().mean().sqrt() for x in (logits, their_logits))
    assert 0 < error < 1.3 * their_error


def test_sharded_files_give_the_same_weights(tmp_path):
    whole = tiny_model("qwen3", tmp_path / "whole")
    model = oracle(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    ids = prompt(10)
    one, two = (
        Pages(load_model(tmp_path / name, device=CPU, dtype=torch.float32), page_size=4).step({"a": ids})
        for name in ("whole", "shards")
    )
    assert torch.equal(one, two)


def test_missing_folder_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path / "nowhere", device=CPU, dtype=torch.float32)
