"""A program that is cancelled, at any moment and more than once, leaves nothing running and nothing open."""

import asyncio
import random

import pytest

from frontend_lang import gen, program
from tests.support.backends import ScriptedBackend

pytestmark = pytest.mark.timeout(60)


@program
def plain(s):
    s += "x" + gen("a")
    for num_samples in (1, 2):
        with s.fork(3) as branches:
            branches += gen("b", n=num_samples)
            inner = branches[0].fork(2)
            inner += gen("c")
            inner.join()
    s += gen("end")
    return s["end"]


@program
async def awaiting(s):
    s += "x" + gen("a")
    await s.value("a")
    branches = s.fork(3)
    branches += gen("b")
    await branches.outcomes()
    return (await plain.arun())["end"]


@program
def starting_others(s):
    for _ in plain.stream():
        pass
    s += "y" + gen("a")
    return [outcome["end"] for outcome in plain.map([{}, {}])]


async def ran(way, each):
    match way:
        case "arun":
            await each.arun()
        case "amap":
            await each.amap([{}, {}])
        case "astream":
            async with each.astream() as stream:
                async for _ in stream:
                    pass


async def cancelled_at_random(seed, way, each):
    chance = random.Random(seed)
    for _ in range(60):
        backend = ScriptedBackend(delay_s=chance.choice([0, 0, 0.0005]))
        task = asyncio.ensure_future(ran(way, each.with_options(backend=backend)))
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0)
        for _ in range(chance.choice([1, 1, 2, 3])):
            task.cancel()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        assert asyncio.all_tasks() == {asyncio.current_task()}, f"seed {seed}"
        assert (backend.running, backend.open_scopes) == (0, set()), f"seed {seed}"


@pytest.mark.parametrize("way", ["arun", "amap", "astream"])
@pytest.mark.parametrize("each", [plain, awaiting, starting_others], ids=lambda each: each.name)
def test_cancelling_at_any_moment_leaves_nothing_behind(way, each):
    asyncio.run(cancelled_at_random(7, way, each))


def test_a_stream_left_open_inside_a_program_lets_go_of_its_scopes():
    backend = ScriptedBackend(delay_s=0.005)
    inner = plain.with_options(backend=backend)

    @program
    def outer(s):
        return next(inner.stream().text_iter("a"))

    assert outer.with_options(backend=backend).run().value == "o"
    assert (backend.running, backend.open_scopes) == (0, set())


def test_what_a_program_raises_hangs_together_with_nothing_of_ours():
    @program
    def wrong(s):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        wrong.with_options(backend=ScriptedBackend()).run()
    assert caught.value.__context__ is None
