"""Batches: what has come is read at once, what nobody waits for wakes nobody."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixrt import RequestAborted, SamplingParams
from radixrt.server.running import Batch
from tests.support.servers import client

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


LONG = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)


async def started(engine, params):
    with ThreadPoolExecutor(1) as executor:
        return await Batch.start(
            engine.submit,
            [engine.request("hello", params)],
            mailbox=engine.mailbox(),
            deadline_s=time.perf_counter() + 60,
            executor=executor,
        )


def test_what_came_meanwhile_is_read_at_once_and_in_order(engine):
    expected = engine.generate("hello", PARAMS)

    async def main():
        batch = await started(engine, PARAMS)
        while (
            now := engine.stats()
        ).num_running or now.num_waiting:  # the loop stands still until all has come
            time.sleep(0.01)
        bursts = [chunks async for chunks in batch]
        batch.close()
        return bursts

    [burst] = asyncio.run(main())
    assert tuple(token_id for _, chunk, _ in burst for token_id in chunk.token_ids) == expected.token_ids
    assert burst[-1][1].usage is not None
    times = [at_s for _, _, at_s in burst]
    assert times == sorted(times)
    assert times[-1] > times[0]  # each has its own, however late it is read


def test_what_came_before_an_error_is_read_before_it(engine):
    async def main():
        batch = await started(engine, LONG)
        while len(batch._reader.items) < 3:
            await asyncio.sleep(0.001)
        [ticket] = batch._open.values()
        ticket.abort()
        while not isinstance(batch._reader.items[-1][1], RequestAborted):
            await asyncio.sleep(0.001)
        found = await anext(batch)
        assert len(found) >= 3
        with pytest.raises(RequestAborted):
            await anext(batch)

    asyncio.run(main())


def test_a_whole_answer_wakes_the_event_loop_once(engine, monkeypatch):
    launch, launched_s = engine._runner.launch, []

    def launch_later(plan):
        launched_s.append(time.perf_counter())
        if len(launched_s) == 3:
            # The rest takes longer than the first token did, whatever that had to wait for.
            time.sleep(launched_s[1] - began_s + 0.05)
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", launch_later)

    async def main():
        loop, wakes = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe

        def counted(callback, *args, **named):
            if "_hand_over" in callback.__qualname__:
                wakes.append(callback)
            return call(callback, *args, **named)

        loop.call_soon_threadsafe = counted
        async with client(engine) as http:
            answer = await http.post("/generate", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True})
        return answer.json(), len(wakes)

    began_s = time.perf_counter()
    answer, num_wakes = asyncio.run(main())
    assert len(answer["samples"][0]["token_ids"]) == 100
    assert 0 < answer["first_token_s"] < answer["seconds"] / 2  # told as it was, though read at the end
    assert num_wakes <= 2  # a first token may come before it is known that only the whole is wanted
