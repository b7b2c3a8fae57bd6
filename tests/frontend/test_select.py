"""Select: exact probabilities, a trie of which only the leaves are computed, and who wins by which method."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_lang import gen, program, select
from frontend_lang.selection import ScoredChoice, covering, distribution, leaves, winner
from radixrt import Engine, InvalidRequest, SamplingParams
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model
from tests.support.threads import begin_together

pytestmark = pytest.mark.timeout(60)
CHOICES = ["yes", "yes, of course", "yes, o", "no", "nobody", "maybe"]  # some begin with others

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


@given(sequences)
def test_every_sequence_is_the_beginning_of_a_leaf_and_no_leaf_of_another(items):
    chosen = leaves(items)
    for index, position in enumerate(covering(items, chosen)):
        assert items[chosen[position]][: len(items[index])] == items[index]
    for index in chosen:
        for other in chosen:
            assert index == other or items[other][: len(items[index])] != items[index]


def scored(text, *logprobs, unconditional=()):
    return ScoredChoice(text, tuple(map(ord, text)), logprobs, unconditional)


def test_the_mean_does_not_punish_length():
    choices = [scored("ab", -1.0, -1.0), scored("c", -1.5)]
    assert winner("token_length_normalised", choices) == 0
    assert distribution(choices)["c"] > distribution(choices)["ab"]


def test_the_greedy_walk_takes_the_likeliest_token_every_time():
    choices = [scored("ab", -2.0, -0.1), scored("cd", -0.5, -3.0), scored("ce", -0.5, -4.0)]
    assert winner("greedy_token", choices) == 1


@pytest.mark.parametrize(("goes_on", "best"), [(0.9, 1), (0.4, 0)])
def test_where_a_choice_ends_what_no_other_takes_is_the_end(goes_on, best):
    choices = [scored("a", -0.1), scored("ab", -0.1, math.log(goes_on))]
    assert winner("greedy_token", choices) == best


def test_the_ratio_takes_what_the_transcript_makes_likelier():
    choices = [scored("a", -1.0, unconditional=(-0.5,)), scored("b", -2.0, unconditional=(-6.0,))]
    assert winner("unconditional_likelihood", choices) == 1
    assert winner("token_length_normalised", choices) == 0


def test_only_leaves_are_scored():
    asked = []

    class Counting(ScriptedBackend):
        async def score(self, prefix_ids, continuations, *, label="", scope_id=None):
            asked.append([self.decode(each) for each in continuations])
            return await super().score(prefix_ids, continuations, label=label, scope_id=scope_id)

    @program
    def judged(s, method):
        s += "Q: " + select("x", CHOICES, method=method)

    judged.with_options(backend=Counting()).run("token_length_normalised")
    assert asked == [["yes, of course", "nobody", "maybe"]]
    judged.with_options(backend=Counting()).run("unconditional_likelihood")
    assert len(asked) == 3  # with and without the transcript
    with pytest.raises(InvalidRequest, match="method must be one of"):
        select("x", ["a"], method="best")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("method", ["token_length_normalised", "greedy_token", "unconditional_likelihood"])
def test_the_distribution_is_the_softmax_of_whole_sequences_scored_apart(engine, method):
    @program
    def judged(s):
        s += "Is the answer right? " + select("x", CHOICES, method=method)
        return s.distribution("x")

    engine.clear_cache()
    result = judged.with_options(engine=engine).run()
    prompt = list(result.calls[0].prompt_ids)
    apart = []
    for choice in CHOICES:
        engine.clear_cache()
        ids = engine.tokenizer.encode_continuation(choice)
        output = engine.generate([*prompt, *ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        logprobs = tuple(entry.logprob for entry in output.prompt_logprobs[-len(ids) :])
        bare = engine.generate([*engine.tokenizer.encode(""), *ids], SamplingParams(prompt_logprobs=0))
        start = tuple(entry.logprob for entry in bare.prompt_logprobs[-len(ids) :])
        apart.append(ScoredChoice(choice, tuple(ids), logprobs, start))
    whole = math.fsum(math.exp(choice.total) for choice in apart)
    for choice in apart:
        assert result.value[choice.text] == pytest.approx(math.exp(choice.total) / whole, abs=1e-4)
    assert math.fsum(result.value.values()) == pytest.approx(1)
    assert result["x"] == CHOICES[winner(method, apart)]
    assert result.token_ids() == (*prompt, *engine.tokenizer.encode_continuation(result["x"]))


def test_choices_of_one_select_compute_their_prefix_once(engine):
    @program
    def judged(s):
        s += "a long text that all of them share " * 4 + select("x", ["alpha", "beta", "gamma", "delta"])

    engine.clear_cache()
    call = judged.with_options(engine=engine).run().calls[0]
    # the prefix once; then each choice computes its own tokens and the few that its page shares with nobody's
    assert call.computed_tokens <= len(call.prompt_ids) + 4 * (5 + 4 + 1)


def test_choices_run_in_one_step_behind_a_cached_prefix_and_in_two_behind_a_new_one(engine):
    @program
    def judged(s, *, is_warm):
        s += "a long text that all of them share " * 4
        if is_warm:
            s += gen("warm", max_tokens=1)
        s.sync()
        before = engine.stats().num_steps
        begin_together(engine, 3)  # "alpha" is the beginning of another
        s.select("x", ["alpha", "alpha beta", "gamma", "delta"])
        return engine.stats().num_steps - before

    for is_warm, num_steps in ((False, 2), (True, 1)):
        engine.clear_cache()
        assert judged.with_options(engine=engine).run(is_warm=is_warm).value == num_steps
