"""The decoder in C++ against the torch decoder and the plain transformers forward."""

import itertools
import logging
import math
import shutil
from array import array
from dataclasses import replace

import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER

from radixrt.config import DEFAULT_MODEL, home_folder
from radixrt.errors import ModelLoadError
from radixrt.kv.store import KVStore
from radixrt.model.attention import TorchAttention, cpu
from radixrt.model.catalog import load_tokenizer, resolve
from radixrt.model.decoder import Decoder
from radixrt.model.inputs import BatchInputs
from radixrt.model.loader import load_model
from radixrt.model.native import NativeDecoder
from radixrt.model.outputs import Prediction
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights
from tests.support.logs import own_records
from tests.support.models import oracle, tiny_model
from tests.support.variants import EMULATED, EMULATED_TILES, VARIANT_NAMES

CPU = torch.device("cpu")
# In plain C++ what this CPU may lack: the matrix unit, and float16. Both multiply bfloat16 only.
EMULATED_NAMES = [
    EMULATED_TILES[0].name,
    *(variant.name for variant in EMULATED if variant.name == "fp16_emulated"),
]
# Against float64, on logits of order 20: transformers in float32 is up to 1.1e-4 away from it on these models.
TOLERANCE = 2e-4
FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama tied, yarn": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        },
    ),
    "llama, odd sizes": (
        "llama",
        {"hidden_size": 60, "intermediate_size": 90, "head_dim": 16, "vocab_size": 331},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
}

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    kind, overrides = FAMILIES[request.param]
    return tiny_model(kind, tmp_path_factory.mktemp("model"), **overrides)


def build(folder, *, dtype=torch.float32, variant=None, num_threads=1, **overrides):
    spec = ModelSpec.load(folder)
    weights = replace(read_weights(folder, spec, device=CPU, dtype=dtype), **overrides)
    return NativeDecoder.build(
        spec, weights, num_threads=num_threads, build_folder=home_folder() / "build", variant=variant
    )


def torch_decoder(folder, *, dtype=torch.float32):
    spec = ModelSpec.load(folder)
    return Decoder(spec, read_weights(folder, spec, device=CPU, dtype=dtype), TorchAttention())


class Pages:
    """Hand out scattered pages to sequences and run steps of (sequence, tokens up to `stop`)."""

    def __init__(self, decoder, *, page_size, num_pages=512):
        self.decoder = decoder
        self.page_size = page_size
        layout = decoder.spec.kv_layout(page_size=page_size, dtype=decoder.dtype)
        self.store = KVStore(layout, num_pages=num_pages, device=CPU)
        self.store.data.fill_(float("nan"))
        self.free = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0))).tolist()
        self.pages, self.computed = {}, {}

    def share(self, source, target, num_tokens):
        """Let `target` begin with `source`'s pages of its first num_tokens, a multiple of the page size."""
        self.pages[target] = self.pages[source][: num_tokens // self.page_size]
        self.computed[target] = num_tokens

    def step(self, chunks):
        """Compute {name: all token ids up to the end of this chunk}; give logits of all rows, sequence by sequence."""
        new = [len(ids) - self.computed.get(name, 0) for name, ids in chunks.items()]
        return self.forward(chunks).split(new)

    def forward(self, chunks, **overrides):
        """Compute chunks as `step` does; give the logits. Args: overrides: other values of BatchInputs."""
        decoder, inputs = self.decoder, self.inputs(chunks, **overrides)
        return decoder.predict(inputs, self.store, num_token_ids=decoder.spec.vocab_size).logits

    def inputs(self, chunks, **overrides):
        """Give the inputs of a step that computes chunks."""
        for name, ids in chunks.items():
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.page_size < len(ids):
                pages.append(self.free.pop())
        spans = {name: range(self.computed.get(name, 0), len(ids)) for name, ids in chunks.items()}
        width = max(len(self.pages[name]) for name in chunks)
        table = [(*self.pages[name], *[0] * (width - len(self.pages[name]))) for name in chunks]
        self.computed |= {name: len(ids) for name, ids in chunks.items()}
        new = tuple(len(span) for span in spans.values())
        slots = [
            self.pages[name][i // self.page_size] * self.page_size + i % self.page_size
            for name, span in spans.items()
            for i in span
        ]
        values = {
            "token_ids": array("q", [chunks[name][i] for name, span in spans.items() for i in span]),
            "positions": array("q", [i for span in spans.values() for i in span]),
            "slots": array("q", slots),
            "page_table": array("i", itertools.chain(*table)),
            "query_start": array("i", itertools.accumulate(new, initial=0)),
            "context_lens": array("i", map(len, chunks.values())),
            "sample_rows": array("q", range(sum(new))),
        }
        return BatchInputs(**values | overrides)


def prompt(num_tokens, *, seed=0):
    return torch.randint(0, 259, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


# name -> its token ids up to the end of each step; several start from the pages of "shared"
STEPS = (
    {"long": prompt(140, seed=1)[:70], "shared": prompt(160, seed=2), "decode": prompt(17, seed=3)[:-1]},
    {
        "long": prompt(140, seed=1)[:71],
        "decode": prompt(17, seed=3),
        "fresh": prompt(33, seed=4),
        **{f"branch{n}": prompt(160, seed=2)[:144] + prompt(1 + n, seed=5 + n) for n in range(4)},
    },
    {
        "long": prompt(140, seed=1),
        **{
            f"branch{n}": prompt(160, seed=2)[:144] + prompt(1 + n, seed=5 + n) + prompt(1 + n % 2, seed=9)
            for n in range(4)
        },
    },
)


def run_steps(decoder, *, page_size, names=None):
    """Give {name: logits of all its rows} after STEPS, for the sequences in `names` (default: all)."""
    pages = Pages(decoder, page_size=page_size)
    found = {}
    for index, step in enumerate(STEPS):
        chunks = {name: ids for name, ids in step.items() if names is None or name in names}
        for name in chunks:
            if index == 1 and name.startswith("branch") and "shared" in pages.pages:
                pages.share("shared", name, 144)
        if chunks:
            for name, logits in zip(chunks, pages.step(chunks), strict=True):
                found.setdefault(name, []).append(logits)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_mixed_batch_equals_plain_forward(folder, page_size, variant):
    model = oracle(folder).double()
    found = run_steps(build(folder, variant=variant, num_threads=2), page_size=page_size)
    last = {name: ids for step in STEPS for name, ids in step.items()}
    for name, logits in found.items():
        assert logits.dtype == torch.float32
        expected = plain_logits(model, last[name])[-len(logits) :]
        torch.testing.assert_close(logits.double(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", [*VARIANT_NAMES, *EMULATED_NAMES])
def test_bfloat16_is_as_near_to_float32_as_the_torch_decoder(folder, variant):
    exact = torch.cat([*run_steps(torch_decoder(folder), page_size=4).values()])
    theirs = torch.cat([*run_steps(torch_decoder(folder, dtype=torch.bfloat16), page_size=4).values()])
    ours = torch.cat([*run_steps(build(folder, dtype=torch.bfloat16, variant=variant), page_size=4).values()])
    error, their_error = ((x - exact).square().mean().sqrt() for x in (ours, theirs))
    assert 0 < error < 1.05 * their_error


@pytest.mark.parametrize("variant", [*VARIANT_NAMES, *EMULATED_NAMES])
def test_activations_past_the_range_of_float16_lose_nothing(tmp_path, variant):
    """Gates and ups 2^9 times as large make inputs of the next product of some 10^6; that product's weights are small."""
    folder = tiny_model("llama", tmp_path)
    spec = ModelSpec.load(folder)

    def scaled(dtype):
        weights = read_weights(folder, spec, device=CPU, dtype=dtype)
        for layer in weights.layers:
            layer.gate_up.weight.mul_(2.0**9)
            layer.down.weight.mul_(2.0**-18)
        return weights

    exact = torch.cat(
        [*run_steps(Decoder(spec, scaled(torch.float32), TorchAttention()), page_size=4).values()]
    )
    theirs = torch.cat(
        [*run_steps(Decoder(spec, scaled(torch.bfloat16), TorchAttention()), page_size=4).values()]
    )
    decoder = NativeDecoder.build(
        spec, scaled(torch.bfloat16), num_threads=1, build_folder=home_folder() / "build", variant=variant
    )
    ours = torch.cat([*run_steps(decoder, page_size=4).values()])
    error, their_error = ((x - exact).square().mean().sqrt() for x in (ours, theirs))
    assert error < 1.05 * their_error


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *itertools.product(VARIANT_NAMES, [torch.float32, torch.bfloat16]),
        *((name, torch.bfloat16) for name in EMULATED_NAMES),
    ],
)
def test_neither_company_nor_cache_changes_a_bit(folder, dtype, variant):
    decoder = build(folder, dtype=dtype, variant=variant)
    together = run_steps(decoder, page_size=4)
    for name, logits in together.items():
        alone = run_steps(decoder, page_size=4, names={name})[name]
        # alone, a branch computes the prefix that it shares otherwise
        assert torch.equal(logits, alone[-len(logits) :])


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [(torch.float32, None), *((torch.bfloat16, name) for name in (None, *EMULATED_NAMES))],
)
def test_neither_threads_nor_page_size_change_a_bit(folder, dtype, variant):
    one = run_steps(build(folder, dtype=dtype, variant=variant), page_size=16)
    many = run_steps(build(folder, dtype=dtype, variant=variant, num_threads=3), page_size=1)
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [(torch.float32, None), *((torch.bfloat16, name) for name in (None, *EMULATED_NAMES))],
)
def test_chunks_change_no_bit(folder, dtype, variant):
    decoder, ids = build(folder, dtype=dtype, variant=variant), prompt(90)
    (whole,) = Pages(decoder, page_size=4).step({"a": ids})
    pages = Pages(decoder, page_size=4)
    parts = [pages.step({"a": ids[:stop]})[0] for stop in (1, 2, 40, 63, 64, 65, 90)]
    assert torch.equal(torch.cat(parts), whole)


def run_wanting(decoder, choose, *, page_size=4):
    """Run STEPS; give each step's logits of the rows choose(new tokens of each chunk), those rows, and the store."""
    pages, found = Pages(decoder, page_size=page_size), []
    for index, chunks in enumerate(STEPS):
        for name in chunks:
            if index == 1 and name.startswith("branch"):
                pages.share("shared", name, 144)
        rows = choose([len(ids) - pages.computed.get(name, 0) for name, ids in chunks.items()])
        found.append((pages.forward(chunks, sample_rows=array("q", rows.tolist())), rows))
    return found, pages.store.data


def some_rows(new):
    """Any rows in any order, some twice."""
    return torch.randint(0, sum(new), (2 * sum(new) // 3,), generator=torch.Generator().manual_seed(sum(new)))


@pytest.mark.parametrize(
    "choose",
    [
        some_rows,
        lambda new: some_rows(new).unique(),
        lambda new: torch.tensor(new).cumsum(0) - 1,
        lambda new: torch.empty(0, dtype=torch.int64),
    ],
    ids=["some", "some in order", "the last ones", "none"],
)
@pytest.mark.parametrize(
    ("dtype", "variant"),
    [(torch.float32, None), *((torch.bfloat16, name) for name in (None, *EMULATED_NAMES))],
)
def test_rows_that_are_not_wanted_change_no_bit(folder, dtype, variant, choose):
    decoder = build(folder, dtype=dtype, variant=variant, num_threads=2)
    everything, full_store = run_wanting(decoder, lambda new: torch.arange(sum(new)))
    wanted, store = run_wanting(decoder, choose)
    for (logits, rows), (all_logits, _) in zip(wanted, everything, strict=True):
        assert torch.equal(logits, all_logits[rows])
    torch.testing.assert_close(store, full_store, atol=0, rtol=0, equal_nan=True)


def test_only_wanted_rows_are_given(folder):
    decoder, ids = build(folder), prompt(12)
    (everything,) = Pages(decoder, page_size=4).step({"a": ids})
    found = Pages(decoder, page_size=4).forward({"a": ids}, sample_rows=array("q", [11, 3]))
    assert torch.equal(found, everything[[11, 3]])
    some = Pages(decoder, page_size=4).forward({"a": ids}, sample_rows=array("q"))
    assert some.shape == (0, decoder.spec.vocab_size)


def distinct(head):
    return head


def repeated(head):
    """Every logit comes many times, in several panels."""
    return head[torch.arange(len(head)) % 7].contiguous()


def broken(head):
    """One token has a logit that is no number."""
    head = head.clone()
    head[40] = float("nan")
    return head


@pytest.mark.parametrize("change", [distinct, repeated, broken])
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_the_likeliest_token_is_the_first_of_the_largest_logits(tmp_path, variant, change):
    folder = tiny_model("llama", tmp_path, hidden_size=64, vocab_size=331)  # the last panel is not full
    head = torch.randn(331, 64, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        decoder = build(folder, dtype=dtype, variant=variant, num_threads=2, head=change(head).to(dtype))
        for num_token_ids in (331, 330, 300, 97, 32, 3, 1):
            pages = Pages(decoder, page_size=4)
            inputs = pages.inputs({"a": prompt(30), "b": prompt(3, seed=1)})
            found = decoder.predict(inputs, pages.store, num_token_ids=num_token_ids)
            expected = Prediction.of(found.logits, num_token_ids=num_token_ids)
            if change is broken and num_token_ids > 40:
                assert all(map(math.isnan, found.largest))
            else:
                assert found[1:] == expected[1:]


@pytest.mark.parametrize("num_token_ids", [0, 321])
def test_tokens_that_can_be_drawn_are_some_of_the_vocabulary(tmp_path, num_token_ids):
    pages = Pages(build(tiny_model("llama", tmp_path)), page_size=4)
    with pytest.raises(ValueError, match=rf"num_token_ids must be in \[1, 320\], got {num_token_ids}"):
        pages.decoder.predict(pages.inputs({"a": [1]}), pages.store, num_token_ids=num_token_ids)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"token_ids": array("q", [1, 999])}, r"token_ids must be in \[0, vocab_size\)"),
        ({"token_ids": array("q", [1, -1])}, r"token_ids must be in"),
        ({"token_ids": array("i", [1, 2])}, r"token_ids must be \[2\] 'q', got \[2\] 'i'"),
        ({"token_ids": [1, 2]}, "token_ids must be an array, got list"),
        ({"slots": array("q", [0, 1 << 40])}, "slots must lie in the KV store"),
        ({"slots": array("q", [0])}, r"slots must be \[2\] 'q', got \[1\] 'q'"),
        ({"sample_rows": array("q", [2])}, "sample_rows must be rows of the step"),
        ({"page_table": array("i", [512])}, "page_table must name pages"),
        ({"page_table": array("i")}, "page_table must have as many pages for each of 1 sequences"),
        ({"context_lens": array("i", [1])}, "1 <= new tokens <= context"),
        ({"context_lens": array("i")}, "page_table must have as many pages for each of 0 sequences"),
        ({"positions": array("q", [0, 1, 2])}, r"positions must be \[2\] 'q', got \[3\] 'q'"),
    ],
)
def test_inputs_that_would_leave_the_store_are_refused(tmp_path, overrides, text):
    pages = Pages(build(tiny_model("llama", tmp_path)), page_size=4)
    with pytest.raises(ValueError, match=text):
        pages.forward({"a": [1, 2]}, **overrides)


def test_native_decoder_is_loaded_where_there_is_a_compiler(tmp_path):
    folder = tiny_model("llama", tmp_path)
    assert isinstance(load_model(folder, device=CPU, dtype=torch.float32, kernels="auto"), NativeDecoder)
    assert isinstance(load_model(folder, device=CPU, dtype=torch.float32, kernels="torch"), Decoder)


def test_without_a_compiler_torch_is_used_and_one_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    folder = tiny_model("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_model(folder, device=CPU, dtype=torch.float32, kernels="auto"), Decoder)
    (record,) = own_records(caplog)
    assert "no C++ compiler" in record.getMessage()
    assert "torch decoder is used instead" in record.getMessage()
    with pytest.raises(ModelLoadError, match=r"no C\+\+ compiler"):
        load_model(folder, device=CPU, dtype=torch.float32, kernels="native")


def test_native_on_another_device_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="native kernels are for CPUs, the device is meta"):
        load_model(tmp_path, device=torch.device("meta"), dtype=torch.float32, kernels="native")


def test_weights_of_unsupported_type_are_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"take float32 and bfloat16, got torch\.float16"):
        build(tiny_model("llama", tmp_path), dtype=torch.float16)


def test_door_hands_on_the_kernels():
    assert cpu.CpuDecoder.__module__ == "radixrt_kernels.cpu.decoder"


@pytest.mark.model
def test_greedy_tokens_of_the_default_model_equal_transformers():
    folder = resolve(DEFAULT_MODEL, home=home_folder())
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    texts = ("The capital of France is", "def fibonacci(n):\n", "Der schnelle braune Fuchs springt über")
    sequences = {text: tokenizer.encode(text) for text in texts}
    pages = Pages(build(folder, num_threads=2), page_size=16)
    starts = {text: len(ids) for text, ids in sequences.items()}
    for _ in range(32):
        for text, logits in zip(texts, pages.step(sequences), strict=True):
            sequences[text] = [*sequences[text], int(logits[-1].argmax())]
    model = oracle(folder)
    for text, ids in sequences.items():
        # Each new token is the likeliest after all before it: the same as generating them one by one.
        assert ids[starts[text] :] == plain_logits(model, ids).argmax(-1).tolist()[starts[text] - 1 : -1]
