"""From the engine's thread to event loops: all arrives, in order, with one wake-up per step."""

import asyncio
import random
import threading

import pytest

from radixrt import AsyncEngine, Engine, EngineStopped, FinishReason, InvariantViolation, SamplingParams
from radixrt.mailbox import MAX_PER_TURN, Mailbox, Reader
from tests.support.engines import tiny_engine
from tests.support.threads import begin_together, held_up, wait_until

NUM_STREAMS = 12
LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
HANG_S = 60


@pytest.fixture
def engine(folder):
    with tiny_engine(folder) as engine:
        yield engine


def count_wakes(loop):
    """Count from now on how often a thread wakes a loop."""
    wakes, call = [], loop.call_soon_threadsafe

    def counted(*args):
        wakes.append(threading.current_thread().name)
        return call(*args)

    loop.call_soon_threadsafe = counted
    return wakes


async def streamed(engine, prompt, sampling=SHORT):
    return tuple(
        [
            token_id
            async for chunk in AsyncEngine(engine).stream(prompt, sampling)
            for token_id in chunk.token_ids
        ]
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_reader_gets_its_items_in_order(seed):
    rng = random.Random(seed)

    async def main():
        woken = []
        mailbox = Mailbox(asyncio.get_running_loop(), woken.append)
        readers = [Reader(mailbox) for _ in range(40)]
        sent = [[] for _ in readers]

        def post():
            for number in range(4000):
                index = rng.randrange(len(readers))
                sent[index].append(number)
                readers[index].post(number)
                if rng.random() < 0.05:
                    while woken:
                        woken.pop().wake()
            for index, reader in enumerate(readers):
                sent[index].append(None)
                reader.post(None)
            while woken:
                woken.pop().wake()

        async def read(reader):
            found = [await reader.next()]
            while found[-1] is not None:
                found.append(await reader.next())
            return found

        async with asyncio.timeout(HANG_S):
            found, _ = await asyncio.gather(asyncio.gather(*map(read, readers)), asyncio.to_thread(post))
        assert found == sent
        assert not any(reader.items for reader in readers)

    asyncio.run(main())


def test_a_turn_serves_few_and_others_have_theirs_between():
    async def main():
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop, Mailbox.wake)
        readers = [Reader(mailbox) for _ in range(3 * MAX_PER_TURN + 1)]
        served, seen = [], []

        async def read(reader):
            await reader.next()
            served.append(reader)

        reading = [asyncio.create_task(read(reader)) for reader in readers]
        await asyncio.sleep(0)
        for reader in readers:
            reader.post("item")
        while len(served) < len(readers):
            await asyncio.sleep(0)
            seen.append(len(served))
        await asyncio.gather(*reading)
        steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
        assert max(steps) == MAX_PER_TURN
        assert served == readers

    asyncio.run(main())


def test_a_closed_loop_is_left_alone():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, Mailbox.wake)
    reader = Reader(mailbox)
    loop.close()
    reader.post("item")
    reader.post("item")
    assert list(reader.items) == ["item", "item"]


def test_a_step_wakes_a_loop_once(engine):
    prompts = [f"prompt {index}" for index in range(NUM_STREAMS)]
    expected = [engine.generate(prompt, SHORT).token_ids for prompt in prompts]

    async def main():
        wakes = count_wakes(asyncio.get_running_loop())
        before = engine.stats().num_steps
        begin_together(engine, NUM_STREAMS)
        found = await asyncio.gather(*(streamed(engine, prompt) for prompt in prompts))
        return found, wakes, engine.stats().num_steps - before

    found, wakes, num_steps = asyncio.run(main())
    assert found == expected
    assert set(wakes) == {"radixrt-engine"}
    assert 1 <= len(wakes) <= num_steps < NUM_STREAMS * SHORT.max_tokens


def test_loops_in_several_threads_get_their_own(engine):
    prompts = [f"prompt {index}" for index in range(4)]
    expected = {prompt: engine.generate(prompt, SHORT).token_ids for prompt in prompts}
    found = {}

    def run(index):
        async def main():
            for prompt in prompts[index:] + prompts[:index]:
                found[index, prompt] = await streamed(engine, prompt)

        asyncio.run(main())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert found == {(index, prompt): expected[prompt] for index in range(4) for prompt in prompts}


def test_an_engine_keeps_no_closed_loops(engine):
    for _ in range(5):
        asyncio.run(streamed(engine, "hello"))
    assert len(engine._loop._mailboxes) == 1


def test_a_stream_whose_loop_was_closed_ends_and_harms_nobody(engine):
    loop = asyncio.new_event_loop()
    stream = AsyncEngine(engine).stream("hello", LONG)
    first = loop.run_until_complete(anext(stream))
    assert first.token_ids
    loop.close()
    assert engine.generate("bye", SHORT).finish_reason is FinishReason.LENGTH
    while engine.stats().num_running:
        engine.generate("bye", SHORT)


@pytest.mark.parametrize("end", ["closed", "died"])
def test_whoever_reads_is_told_when_the_engine_ends(folder, monkeypatch, end):
    engine = Engine(folder, dtype="float32", num_pages=400, threads=1)

    async def main():
        reading = [asyncio.create_task(streamed(engine, f"prompt {index}", LONG)) for index in range(4)]
        waiting = [asyncio.create_task(AsyncEngine(engine).generate("hello", LONG)) for _ in range(2)]
        with held_up(engine) as is_there:
            await asyncio.to_thread(wait_until, is_there.is_set)
            if end == "closed":
                closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
                await asyncio.to_thread(wait_until, lambda: not engine.is_running)
            else:
                closing = asyncio.sleep(0)

                def broken():
                    raise InvariantViolation("injected")

                monkeypatch.setattr(engine._loop, "_step", broken)
        await closing
        async with asyncio.timeout(HANG_S):
            return await asyncio.gather(*reading, *waiting, return_exceptions=True)

    found = asyncio.run(main())
    assert [type(item) for item in found] == [EngineStopped] * 6
    engine.close()


def test_tokens_do_not_wait_for_a_further_step(engine):
    async def main():
        stream = AsyncEngine(engine).stream("hello", SHORT)
        async with asyncio.timeout(HANG_S):
            with held_up(engine) as is_there:
                found = [await anext(stream) for _ in range(2)]
                await asyncio.to_thread(wait_until, is_there.is_set)
            return found + [chunk async for chunk in stream]

    found = asyncio.run(main())
    assert sum(len(chunk.token_ids) for chunk in found) == SHORT.max_tokens


def test_an_abort_between_steps_tells_its_reader_at_once(engine):
    async def main():
        reader = Reader(engine.mailbox())
        with held_up(engine):
            ticket = engine.submit(engine.request("hello", LONG), reader.post)
            await reader.next()
            ticket.abort()
        async with asyncio.timeout(HANG_S):
            while not isinstance(item := await reader.next(), BaseException):
                pass
        return item

    assert type(asyncio.run(main())).__name__ == "RequestAborted"
