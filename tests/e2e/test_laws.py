"""Promise 2 on a real engine: neither cache nor company changes an answer (float32, token for token)."""

import queue
import random

import pytest

from radixrt import Engine, GenerateRequest, GrammarSpec, SamplingParams
from tests.support.models import tiny_model
from tests.support.threads import begin_together

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
WARM = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, top_k=50, ignore_eos=True, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")


def open_engine(folder, **options):
    defaults = {"dtype": "float32", "checks": "step", "num_pages": 200, "page_size": 4, "threads": 1}
    return Engine(folder, **{**defaults, **options})


def prompts(count=8, seed=0):
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(40)]
    return [
        [*stem[: rng.randrange(1, 40)], *(rng.randrange(256) for _ in range(rng.randrange(1, 8)))]
        for _ in range(count)
    ]


def answers(engine, sampling=GREEDY):
    return [output.token_ids for output in engine.generate(prompts(), sampling)]


@pytest.fixture(scope="module")
def alone(folder):
    """Every prompt by itself, whole, without cache: greedy answers and warm ones."""
    with open_engine(folder, prefix_cache=False) as engine:
        return [
            [engine.generate(prompt, sampling).token_ids for prompt in prompts()]
            for sampling in (GREEDY, WARM)
        ]


def both(engine):
    return [answers(engine, GREEDY), answers(engine, WARM)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_cache_on_equals_cache_off_and_batched_equals_alone(folder, alone, page_size, prefix_cache):
    with open_engine(folder, page_size=page_size, prefix_cache=prefix_cache, num_pages=600) as engine:
        assert both(engine) == alone
        assert both(engine) == alone  # now everything is cached
        hits = engine.stats().cached_tokens
    assert (hits > 0) == prefix_cache


@pytest.mark.parametrize("max_step_tokens", [1, 5])
def test_chunked_prefill_equals_whole(folder, alone, max_step_tokens):
    with open_engine(folder, max_step_tokens=max_step_tokens) as engine:
        assert both(engine) == alone


def test_preempted_equals_undisturbed(folder, alone):
    with open_engine(folder, num_pages=26, page_size=4, prefix_cache=False) as engine:
        for _ in range(8):  # short outputs are expected now, so that more is admitted than will fit
            engine.generate([1], SamplingParams(max_tokens=1))
        for sampling, expected in zip((GREEDY, WARM), alone, strict=True):
            begin_together(engine, 8)
            assert answers(engine, sampling) == expected
        assert engine.stats().num_preemptions > 0


def test_seed_gives_the_same_tokens_alone_and_among_16_others(folder):
    with open_engine(folder, num_pages=600) as engine:
        prompt = prompts()[0]
        expected = engine.generate(prompt, WARM).token_ids
        others = [SamplingParams(max_tokens=9 + index, temperature=2.0, seed=index) for index in range(16)]
        batch = engine.generate([*prompts(16, seed=1), prompt], [*others, WARM])
        assert batch[-1].token_ids == expected


def test_samples_compute_the_prompt_once_and_equal_their_lone_runs(folder):
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=4, ignore_eos=True)
    prompt = prompts()[3]
    with open_engine(folder, prefix_cache=False) as engine:
        first = engine.generate(prompt, sampling)
        assert first.usage.computed_tokens == len(prompt) + 3 + 4 * 5
        assert engine.generate(prompt, sampling).samples == first.samples
        assert len({sample.token_ids for sample in first.samples}) > 1


def test_branches_of_a_prefix_equal_separate_runs(folder):
    stem = prompts()[5] * 3
    branches = [[*stem, 65 + index, 66] for index in range(4)]
    with open_engine(folder, prefix_cache=False) as engine:
        separate = [engine.generate(branch, GREEDY).token_ids for branch in branches]
    with open_engine(folder) as engine:
        outputs = engine.generate(branches, GREEDY)
    assert [output.token_ids for output in outputs] == separate
    assert sum(output.usage.computed_tokens - 11 for output in outputs) <= len(stem) + 4 * 2 + 4


def test_constrained_answers_do_not_depend_on_company_or_cache(folder):
    grammar = GrammarSpec.regex("(yes|no), because [a-z ]{3,20}[.]")
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=grammar)
    with open_engine(folder, prefix_cache=False) as engine:
        expected = [engine.generate(prompt, sampling).token_ids for prompt in prompts()]
    with open_engine(folder, num_pages=600) as engine:
        assert [output.token_ids for output in engine.generate(prompts(), sampling)] == expected
        assert [output.token_ids for output in engine.generate(prompts(), sampling)] == expected


def test_logprobs_are_the_same_cached_batched_and_alone(folder):
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    with open_engine(folder) as engine:
        lone = [engine.generate(prompt, sampling) for prompt in prompts()]
        batch = engine.generate(prompts(), sampling)
    for left, right in zip(lone, batch, strict=True):
        assert [item.token_id for item in left.logprobs] == list(left.token_ids)
        assert len(left.prompt_logprobs) == len(left.prompt_ids) - 1
        for one, other in zip(
            [*left.logprobs, *left.prompt_logprobs], [*right.logprobs, *right.prompt_logprobs], strict=True
        ):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


def test_logprobs_of_named_ids_are_those_of_the_whole_distribution(folder):
    with Engine(folder, dtype="float32", num_pages=64) as engine:
        whole = engine.generate([5, 6, 7], SamplingParams(max_tokens=1, temperature=0, logprobs=20))
        likeliest = whole.logprobs[0].top
        wanted = tuple(token_id for token_id, _ in reversed(likeliest[3:9]))
        sampling = SamplingParams(
            max_tokens=1, temperature=0, logprobs=2, logprob_token_ids=wanted, ignore_eos=True
        )
        found = engine.generate([5, 6, 7], sampling).logprobs[0].top
    assert [token_id for token_id, _ in found] == [*(token_id for token_id, _ in likeliest[:2]), *wanted]
    values = dict(likeliest)
    for token_id, value in found:
        assert value == pytest.approx(values[token_id], abs=1e-5)


def test_scored_suffix_equals_the_whole_prompts_logprobs(folder):
    prompt = prompts()[4]
    with open_engine(folder) as engine:
        whole = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
        items = []
        request = GenerateRequest(
            tuple(prompt), SamplingParams(max_tokens=1, prompt_logprobs=0), logprob_start=len(prompt) - 3
        )
        inbox = queue.Queue()
        engine.submit(request, inbox.put)
        while not items or items[-1].usage is None:
            items.append(inbox.get(timeout=30))
    suffix = items[0].prompt_logprobs
    assert [item.token_id for item in suffix] == prompt[-3:]
    assert items[-1].usage.cached_tokens == len(prompt) - 4
    for one, other in zip(suffix, whole[-3:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
