"""Choosing among branches."""

import pytest
from pydantic import BaseModel

from frontend_lang import ProgramError, best_of, gen, mean_logprob, program, vote
from radixrt import Engine
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(60)


class Answer(BaseModel):
    number: int


@program
def sampled(s, n, options, choose):
    s += "Q" + gen("x", n=n, **options)
    return choose(s["x"])


@program
def forked(s, n, options, choose):
    s += "Q"
    branches = s.fork(n)
    branches += gen("x", **options)
    return choose(branches)


@pytest.mark.parametrize("runner", [sampled, forked])
def test_most_votes_win_and_the_first_of_equals(runner):
    def run(answers, **options):
        return runner.with_options(backend=ScriptedBackend(answers)).run(
            len(answers), options, lambda branches: vote(branches, "x")
        )

    result = run(["a", "b", "b", "c"]).value
    assert (result.value, result.share, result.num_failed) == ("b", 0.5, 0)
    assert result.counts == (("a", 1), ("b", 2), ("c", 1))
    assert run(["b", "a"]).value.value == "b"
    result = run(['{"number": 4}', '{"number":4}', '{"number": 5}'], schema=Answer).value
    assert result.value == Answer(number=4)


def test_a_failed_branch_has_no_vote_and_a_vote_without_votes_raises():
    def choose(branches):
        return vote(branches, "x", key=str.strip)

    backend = ScriptedBackend([" a", "b", "a ", "c"], fail_at={1})
    result = forked.with_options(backend=backend).run(4, {}, choose).value
    assert (result.value, result.num_failed) == ("a", 1)
    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        forked.with_options(backend=ScriptedBackend(fail_at={0, 1})).run(2, {}, choose)


def test_the_best_branch_by_a_variable_or_a_function():
    backend = ScriptedBackend(["2", "7", "5"], fail_at={0})
    best = forked.with_options(backend=backend).run(
        3, {"type": int}, lambda branches: best_of(branches, "x")["x"]
    )
    assert best.value == 7
    least = forked.with_options(backend=ScriptedBackend(["2", "7", "5"])).run(
        3, {"type": int}, lambda branches: best_of(branches, lambda state: -state["x"]).text()
    )
    assert least.value == "Q2"
    with pytest.raises(ValueError, match=r"mean_logprob needs gen\(\"x\", logprobs=0\)"):
        forked.with_options(backend=ScriptedBackend()).run(
            2, {}, lambda branches: best_of(branches, mean_logprob("x"))
        )


def test_an_async_program_votes_after_its_outcomes():
    @program
    async def voting(s):
        branches = s.fork(3)
        branches += gen("x")
        await branches.outcomes()
        return vote(branches, "x").value

    assert voting.with_options(backend=ScriptedBackend(["a", "b", "b"], delay_s=0.001)).run().value == "b"


def test_the_surest_sample_on_an_engine(tmp_path):
    folder = tiny_model("qwen3", tmp_path / "tiny")

    def choose(branches):
        best = best_of(branches, mean_logprob("x"))
        return mean_logprob("x")(best), [mean_logprob("x")(branch) for branch in branches]

    with Engine(folder, dtype="float32", checks="step", num_pages=300, page_size=4, threads=1) as engine:
        options = {"logprobs": 0, "max_tokens": 5, "seed": 2}
        best, every = sampled.with_options(engine=engine).run(4, options, choose).value
    assert best == max(every) > min(every)
