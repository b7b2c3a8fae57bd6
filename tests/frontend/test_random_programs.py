"""Random programs: whatever they are made of, a failed call is told, nothing stays open, and a saved run replays."""

import random

import pytest

from frontend_lang import ProgramError, Trace, gen, program, select
from radixrt import EngineStopped
from tests.support.backends import ScriptedBackend

pytestmark = pytest.mark.timeout(120)
CALL = '{"name": "echo", "arguments": {"x": 1}}'


def echo(x: int) -> int:
    return x


def grow(s, chance, depth):
    """Append one to three random statements."""
    for _ in range(chance.randrange(1, 4)):
        name = f"v{chance.randrange(1000)}"
        match chance.randrange(10):
            case 0:
                s += "text"
            case 1:
                s += gen(name, max_tokens=9)
            case 2:
                s += gen(name, max_tokens=99, tools=[echo])
            case 3:
                s += "c" + select(name, ["aa", "ab"])
            case 4:
                s += gen(name, n=2, max_tokens=9)
            case 5 if depth < 3:
                branches = s.fork(chance.randrange(1, 4))
                for branch in branches:
                    grow(branch, chance, depth + 1)
                if chance.randrange(2):
                    branches.join()
            case 6:
                with s.user():
                    s += "q" + gen(name, max_tokens=9)
            case 7 if depth < 3:
                with s.copy() as other:
                    grow(other, chance, depth + 1)
            case 8:
                with s.var_scope(name):
                    s += "x" + gen(max_tokens=9)
            case 9 if depth < 2:
                nested.run(chance.randrange(10**6))


@program
def nested(s, seed):
    grow(s, random.Random(seed), 2)


@program
def grown(s, seed):
    s += "start"
    grow(s, random.Random(seed), 0)


class Dying(ScriptedBackend):
    """A backend that knows whether a call of it failed."""

    has_failed = False

    async def generate(self, request):
        try:
            return await super().generate(request)
        except EngineStopped:
            self.has_failed = True
            raise


def answer(request, prompt):
    return "ok" if request.sampling.grammar is None else CALL


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_loses_no_error_leaves_nothing_open_and_replays(seed, tmp_path):
    backend = Dying(answer)
    result = grown.with_options(backend=backend).run(seed)
    assert (backend.open_scopes, backend.running) == (set(), 0)
    result.trace.save(tmp_path / "run.json")
    trace = Trace.load(tmp_path / "run.json")
    assert trace == result.trace
    replay = trace.replay()
    again = grown.with_options(backend=replay).run(seed)
    assert (again.text(), replay.unused) == (result.text(), ())
    for index in range(backend.num_calls):
        mortal = Dying(answer, fail_at={index}, delay_s=random.Random(seed).choice([0, 0.0005]))
        try:
            grown.with_options(backend=mortal).run(seed)
        except ProgramError as error:
            cause = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            assert isinstance(cause, EngineStopped)
        else:
            assert not mortal.has_failed  # of several samples of a call only the first is a call
        assert (mortal.open_scopes, mortal.running) == (set(), 0)
