"""The laws of programs on a real engine with a tiny random model (float32, greedy)."""

import itertools
import math
import threading

import pytest

from frontend_lang import (
    EngineBackend,
    ProgramError,
    TextDelta,
    assistant,
    gen,
    program,
    select,
    system,
    user,
)
from radixrt import Engine, EngineStopped, SamplingParams
from tests.support.models import tiny_model
from tests.support.places import place
from tests.support.threads import wait_until

pytestmark = pytest.mark.timeout(120)
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left(engine):
    engine.clear_cache()
    yield
    engine.check()


@program
def tips(s, topic):
    s += system("Short.") + user(f"About {topic}")
    branches = s.fork(3)
    for index, branch in enumerate(branches):
        branch += user(f"Tip {index}") + assistant("Tip: ", gen("tip"))
    return [branch["tip"] for branch in branches]


@program
def one_tip(s, topic, index):
    s += system("Short.") + user(f"About {topic}")
    s += user(f"Tip {index}") + assistant("Tip: ", gen("tip"))


def test_forked_equals_separate(engine):
    forked = tips.with_options(engine=engine, **GREEDY).run("trees")
    engine.clear_cache()
    alone = [one_tip.with_options(engine=engine, **GREEDY).run("trees", index) for index in range(3)]
    assert forked.value == [result["tip"] for result in alone]
    assert [call.token_ids for call in forked.calls] == [result.calls[0].token_ids for result in alone]
    assert [call.prompt_ids for call in forked.calls] == [result.calls[0].prompt_ids for result in alone]


def test_many_programs_at_once_equal_each_alone(engine):
    runner = tips.with_options(engine=engine, **GREEDY)
    topics = [f"topic {index % 5}" for index in range(20)]
    together = runner.map([(topic,) for topic in topics], max_concurrency=20)
    alone = {topic: runner.run(topic).value for topic in set(topics)}
    assert [outcome.unwrap().value for outcome in together] == [alone[topic] for topic in topics]


def test_forks_compute_their_prefix_once(engine):
    result = tips.with_options(engine=engine, **GREEDY).run("a rather long topic of many tokens")
    shared = len(result.token_ids())
    assert sum(call.cached_tokens >= shared for call in result.calls) >= 2


def test_a_later_turn_computes_only_what_is_new(engine):
    @program
    def turns(s):
        for index in range(4):
            s += user(f"Turn {index}") + assistant(gen("x"))

    calls = turns.with_options(engine=engine, **GREEDY).run().calls
    for earlier, later in itertools.pairwise(calls):
        assert later.prompt_ids[: earlier.prompt_tokens] == earlier.prompt_ids
        assert later.cached_tokens >= earlier.prompt_tokens + len(earlier.token_ids) - 1


def test_the_first_turns_tokens_are_the_chat_templates_own(engine):
    @program
    def ask(s):
        s += system("Short.") + user("What?") + assistant(gen("x"))

    call = ask.with_options(engine=engine, **GREEDY).run().calls[0]
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What?"}]
    pieces = engine.tokenizer.chat.render(messages, add_generation_prompt=True)
    assert list(call.prompt_ids) == engine.tokenizer.encode_pieces(pieces)


def test_select_tells_the_models_own_probabilities(engine):
    @program
    def judge(s):
        s += "Is it good? " + select("verdict", choices=["yes", "no", "maybe"])

    result = judge.with_options(engine=engine).run()
    call = result.calls[0]
    totals = {}
    for choice in ("yes", "no", "maybe"):
        prompt = [*call.prompt_ids, *engine.tokenizer.encode_continuation(choice)]
        output = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
        entries = output.prompt_logprobs[len(call.prompt_ids) - 1 :]
        totals[choice] = (math.fsum(entry.logprob for entry in entries), len(entries))
    weight = math.fsum(math.exp(total) for total, _ in totals.values())
    for choice, (total, _) in totals.items():
        assert call.distribution[choice] == pytest.approx(math.exp(total) / weight, abs=1e-5)
    assert result["verdict"] == max(totals, key=lambda choice: totals[choice][0] / totals[choice][1])


def test_constraints_hold_with_every_other_option(engine):
    @program
    def constrained(s):
        s += "Pick: " + gen("a", choices=["red", "green"], temperature=2.0, seed=1)
        s += " " + gen("b", regex="[0-9]{2}", seed=2, logprobs=1)
        s += " " + gen(
            "c",
            schema={
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        )

    result = constrained.with_options(engine=engine).run()
    assert result["a"] in ("red", "green")
    assert result["b"].isdecimal()
    assert isinstance(result["c"]["x"], bool)
    assert len(result.record("b").logprobs) >= 1
    again = constrained.with_options(engine=engine).run()
    assert (result["a"], result["b"]) == (again["a"], again["b"])


def test_a_stop_text_leaves_text_and_tokens_in_step(engine):
    @program
    def free(s):
        s += "Go" + gen("x", max_tokens=30, temperature=0)

    @program
    def stopped(s, stop):
        s += "Go" + gen("x", max_tokens=30, temperature=0, stop=stop)
        s += "!"

    whole = free.with_options(engine=engine).run()["x"]
    printable = [character for character in whole[3:] if character.isascii()]
    stop = printable[0] if printable else whole[5]
    result = stopped.with_options(engine=engine).run(stop)
    assert result["x"] == whole[: whole.index(stop)]
    assert engine.tokenizer.decode(result.token_ids()) == result.text() == f"Go{result['x']}!"


def test_an_engine_that_closes_under_a_program_is_told(tmp_path):
    @program
    def endless(s):
        s += "x" + gen("x", max_tokens=400, ignore_eos=True)
        closer.start()
        return s["x"]

    with Engine(tiny_model("qwen3", tmp_path / "tiny"), dtype="float32", num_pages=200, threads=1) as mortal:
        closer = threading.Thread(target=mortal.close)
        launch, num_steps = mortal._runner.launch, itertools.count()

        def launch_until_it_closes(plan):
            if next(num_steps) == 3:
                wait_until(lambda: not mortal.is_running)
            return launch(plan)

        mortal._runner.launch = launch_until_it_closes
        with pytest.raises(ProgramError, match=r'gen\("x"\) failed at .*EngineStopped'):
            endless.with_options(engine=mortal).run()
        closer.join()


def test_a_raise_in_the_program_aborts_what_runs(engine):
    @program
    def abandoned(s):
        for branch in s.fork(3):
            branch += "x" + gen("x", max_tokens=400, ignore_eos=True)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        abandoned.with_options(engine=engine).run()
    assert tips.with_options(engine=engine, **GREEDY).run("trees").value
    assert engine.stats().num_running == 0


@program
def branching(s):
    """Make 20 calls: 2 in the root, 3 forks of 4 with one call, 2 in the root after each."""
    s += "Go on: " + gen("a")
    s += gen("b")
    for _ in range(3):
        branches = s.fork(4)
        for branch in branches:
            branch += gen("c")
        s += "".join(branch["c"] for branch in branches)
        s += gen("d") + gen("e")
    return s.text()


class Mortal(EngineBackend):
    """An engine whose calls fail from one of them on, some of them after they have begun to run."""

    def __init__(self, engine, last):
        super().__init__(engine)
        self.num_left = last

    async def generate(self, request):
        self.num_left -= 1
        if self.num_left >= 0:
            return await super().generate(request)
        async for _ in self.stream(request):
            break
        raise EngineStopped("the engine died")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("index", range(20))
def test_an_engine_that_dies_at_any_call_leaves_its_pool_as_it_was(engine, index):
    before = engine.stats().cache.num_free_pages
    options = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    with pytest.raises(ProgramError) as caught:
        branching.with_options(backend=Mortal(engine, index), **options).run()
    assert isinstance(caught.value.__cause__, EngineStopped)
    name = caught.value.call
    assert name == ("ab"[index] if index < 2 else "ccccde"[(index - 2) % 6])
    source = 'gen("d")' if name in "de" else f'gen("{name}")'
    assert caught.value.location == place(branching, source)
    assert caught.value.prompt.startswith("Go on: ")
    stats = engine.stats()
    while stats.num_running or stats.num_waiting:  # an abort takes effect between two steps
        stats = engine.stats()
    engine.clear_cache()
    engine.check()
    cache = engine.stats().cache
    assert (cache.num_free_pages, cache.num_held_pages, cache.num_scopes) == (before, 0, 0)


def test_scopes_hold_the_prefixes_of_live_branches_only(engine):
    held = []

    @program
    def forked(s):
        s += "a shared prefix of some length " + gen("a", max_tokens=4, temperature=0)
        s.sync()
        held.append(engine.stats().cache.num_held_pages)
        branches = s.fork(2)
        branches += " and on " + gen("b", max_tokens=4, temperature=0)
        branches.join()

    forked.with_options(engine=engine).run()
    assert held[0] > 0
    engine.check()
    assert engine.stats().cache.num_held_pages == 0


def test_a_second_level_of_forks_computes_only_its_own_tokens(engine):
    @program
    def two_levels(s):
        s += "a shared beginning that is long enough for several pages. " + gen("a", ignore_eos=True)
        for index, branch in enumerate(s.fork(2)):
            branch += f" way {index}: " + gen("b", ignore_eos=True)
            for number, leaf in enumerate(branch.fork(3)):
                leaf += f" step {number}: " + gen("c", ignore_eos=True)

    calls = two_levels.with_options(engine=engine, temperature=0, max_tokens=6).run().calls
    parents = {call.branch: call for call in calls if call.name != "c"}
    for call in calls:
        if call.name == "c":
            parent = parents[call.branch.rpartition("/")[0]]
            before = (*parent.prompt_ids, *parent.token_ids)
            assert call.prompt_ids[: len(before)] == before  # nothing is tokenized again
            assert (
                call.cached_tokens >= len(before) - 1
            )  # a sampled last token is computed by whoever goes on


def test_no_token_is_computed_twice_because_of_tokenizing_it_again(engine):
    @program
    def chatting(s):
        s += system("Short.")
        for index in range(3):
            s += user(f"Turn {index}") + assistant("So: ", gen("x", max_tokens=7, temperature=0))
            s += user("Pick.") + assistant(select("y", ["one", "two"]))

    calls = chatting.with_options(engine=engine).run().calls
    for earlier, later in itertools.pairwise(calls):
        written = (*earlier.prompt_ids, *earlier.token_ids)
        assert later.prompt_ids[: len(written)] == written


def test_leaving_a_stream_early_ends_its_calls_in_the_engine(engine):
    @program
    def endless(s):
        s += "x" + gen("x", max_tokens=400, ignore_eos=True)
        branches = s.fork(3)
        branches += gen("y", max_tokens=400, ignore_eos=True)

    before = engine.stats().output_tokens
    for event in endless.with_options(engine=engine, temperature=0).stream():
        if isinstance(event, TextDelta) and event.is_generated:
            break

    def is_idle():
        stats = engine.stats()
        return not (stats.num_running or stats.num_waiting or stats.cache.num_scopes)

    wait_until(is_idle)
    stats = engine.stats()
    assert stats.output_tokens - before < 4 * 400
