"""The engine's doors: streams, aborts, faults, ends."""

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from radixrt import (
    AsyncEngine,
    DeadlineExceeded,
    DeviceError,
    Engine,
    EngineStopped,
    FinishReason,
    GenerateRequest,
    GrammarSpec,
    InvalidRequest,
    InvariantViolation,
    Namespace,
    NeverFits,
    OutputCollector,
    QueueFull,
    RequestAborted,
    SamplingParams,
)
from radixrt.text.tool_forms import PLAIN_FORMS
from tests.support.engines import tiny_engine
from tests.support.threads import NewThreads, act_once, held_up, wait_until

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture
def engine(folder):
    with tiny_engine(folder, num_pages=200) as engine:
        yield engine


def read(inbox, timeout=30):
    """Read a request's items to its end."""
    items = []
    while not items or (not isinstance(items[-1], BaseException) and items[-1].usage is None):
        items.append(inbox.get(timeout=timeout))
    return items


def test_stream_adds_up_to_the_output(engine):
    whole = engine.generate("hello", SHORT)
    chunks = list(engine.stream("hello", SHORT))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_leaving_a_stream_aborts_its_request(engine):
    stream = engine.stream("hello", LONG)
    next(stream)
    stream.close()
    assert engine.generate("hello", SHORT).finish_reason is FinishReason.LENGTH
    assert engine.stats().num_running == 0


def test_abort_tells_the_reader(engine):
    inbox = queue.Queue()
    with held_up(engine) as is_there:
        ticket = engine.submit(GenerateRequest((1, 2, 3), LONG), inbox.put)
        wait_until(is_there.is_set)
        ticket.abort()
        ticket.abort()
    assert isinstance(read(inbox)[-1], RequestAborted)


def test_stop_string_is_cut_and_ends_the_sequence(engine):
    text = engine.generate(
        [104, 105], SamplingParams(max_tokens=40, seed=5, grammar=GrammarSpec.regex("[a-z]{30}"))
    ).text
    stop = text[10:13]
    output = engine.generate(
        [104, 105],
        SamplingParams(max_tokens=40, seed=5, grammar=GrammarSpec.regex("[a-z]{30}"), stop=[stop, "never"]),
    )
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason is FinishReason.STOP


def test_stop_token_ends_the_sequence_and_min_tokens_delays_it(engine):
    free = engine.generate("hello", SHORT).token_ids
    stopping = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[free[2]])
    output = engine.generate("hello", stopping)
    assert output.token_ids == free[:2]
    assert output.finish_reason is FinishReason.STOP
    later = SamplingParams(
        max_tokens=5, min_tokens=4, temperature=0, ignore_eos=True, stop_token_ids=[free[2]]
    )
    assert len(engine.generate("hello", later).token_ids) >= 4


def test_max_tokens_is_cut_to_the_context(engine):
    output = engine.generate([1] * 500, LONG)
    assert len(output.token_ids) == 512 - 500
    assert output.finish_reason is FinishReason.LENGTH


def test_namespaces_do_not_share(engine):
    prompt = "the same prompt in two namespaces"
    engine.generate(prompt, SHORT, namespace=Namespace(salt="a"))
    other = engine.generate(prompt, SHORT, namespace=Namespace(salt="b"))
    again = engine.generate(prompt, SHORT, namespace=Namespace(salt="a"))
    assert other.usage.cached_tokens == 0
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert engine.explain(prompt, namespace=Namespace(adapter="a")).num_cached_tokens == 0


def test_explain_names_the_first_differing_token(engine):
    engine.generate("You are a careful judge. Answer yes.", SHORT)
    report = engine.explain("You are a careful cook.")
    assert report.num_cached_tokens == len("You are a careful ")
    assert report.next_text == "c"
    assert report.cached_text.startswith("judge.")
    assert report.before_text == "You are a careful "
    assert "'c'" in str(report)


def test_explain_on_a_timestamp_at_the_head(engine):
    rules = "Answer shortly. Never lie. Cite your sources."
    engine.generate(f"Today is 2026-11-29 10:15. {rules}", SHORT)
    report = engine.explain(f"Today is 2026-11-29 10:16. {rules}")
    assert report.before_text == "Today is 2026-11-29 10:1"
    assert (report.next_text, report.cached_text[0]) == ("6", "5")
    assert report.evicted_reason is None


def test_explain_on_a_changed_order_of_examples(engine):
    shots = ["Q: one? A: 1. ", "Q: two? A: 2. ", "Q: six? A: 6. "]
    engine.generate("".join(shots), SHORT)
    report = engine.explain(shots[0] + shots[2] + shots[1])
    assert report.num_cached_tokens == len(shots[0] + "Q: ")
    assert (report.next_text, report.cached_text[:3]) == ("s", "two")


def test_explain_on_an_evicted_prefix(folder):
    with Engine(folder, dtype="float32", num_pages=20, page_size=4, threads=1) as engine:
        prompt = "the quick brown fox jumps"
        engine.generate(prompt, SHORT)
        engine.generate(
            "something else entirely, and longer than what was there before", SHORT, label="the greedy one"
        )
        report = engine.explain(prompt)
        assert report.num_cached_tokens < report.num_unbounded_tokens == len(prompt) - 1
        assert (report.evicted_for, report.evicted_reason) == ("the greedy one", "room")
        assert report.evicted_ago_s >= 0
        assert "the greedy one" in str(report)
        engine.clear_cache()
        assert engine.explain(prompt).num_cached_tokens == 0
        assert "cleared" in str(engine.explain("something else"))


def test_open_scope_keeps_its_prefix_and_a_closed_one_gives_it_up(folder):
    with Engine(folder, dtype="float32", num_pages=20, page_size=4, threads=1) as engine:
        prompt, others = "keep me in mind", [f"{index} is another prompt of size" for index in range(4)]

        def hit_after_others():
            for other in others:
                engine.generate(other, SHORT)
            return engine.generate(prompt, SHORT).usage.cached_tokens

        with engine.scope() as scope:
            engine.generate(prompt, SHORT, scope=scope)
            assert engine.stats().cache.num_held_pages > 0
            assert hit_after_others() >= 12
        assert engine.stats().cache.num_held_pages == 0
        assert hit_after_others() == 0
        engine.check()


def test_scope_never_stops_a_request_that_needs_the_room(folder):
    with Engine(folder, dtype="float32", num_pages=11, page_size=4, threads=1) as engine:
        scope = engine.scope()
        engine.generate("keep me in mind", SHORT, scope=scope)
        output = engine.generate([1] * 30, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
        assert len(output.token_ids) == 10
        assert engine.stats().cache.num_broken_scopes == 1
        assert engine.stats().cache.num_held_pages == 0
        engine.generate("keep me in mind", SHORT, scope=scope)  # whoever goes on with it has it held again
        assert engine.stats().cache.num_held_pages > 0
        scope.close()
        scope.close()
        assert engine.stats().cache.num_held_pages == 0


def test_a_scope_in_use_does_not_run_out(folder):
    with Engine(folder, dtype="float32", num_pages=60, page_size=4, threads=1) as engine:
        scope = engine.scope(ttl_s=0.001)
        long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        engine.generate("keep me in mind", long, scope=scope)
        assert engine.stats().cache.num_held_pages > 0  # it took longer than the scope lives unused
        time.sleep(0.05)
        engine.generate("something else", SHORT)
        assert engine.stats().cache.num_scopes == 0
        engine.check()


def test_scope_of_another_engine_is_refused(engine, folder):
    with Engine(folder, dtype="float32", num_pages=40, threads=1) as other:
        scope = other.scope()
    with pytest.raises(InvalidRequest, match="scope must be one of this engine"):
        engine.generate("hello", SHORT, scope=scope)
    scope.close()


def test_scope_ends_by_itself(folder):
    with Engine(folder, dtype="float32", num_pages=40, page_size=4, threads=1) as engine:
        engine.generate("keep me in mind", SHORT, scope=engine.scope(ttl_s=0.05))
        threading.Event().wait(0.1)
        engine.generate("x", SHORT)
        assert engine.stats().cache.num_scopes == 0


def test_stats_count_hits_by_label_and_namespace(engine):
    for label, salt in (("ask", "a"), ("ask", "a"), ("judge", "b")):
        engine.generate("one and the same prompt", SHORT, label=label, namespace=Namespace(salt=salt))
    stats = engine.stats()
    assert stats.by_label["ask"].num_requests == 2
    assert stats.by_label["ask"].cached_tokens == len("one and the same prompt") - 1
    assert stats.by_label["judge"].cached_tokens == 0
    assert stats.by_namespace["b|"].num_requests == 1
    assert sum(stats.step_s.counts) == stats.num_steps
    assert sum(stats.wait_s.counts) >= 3
    assert 0 <= stats.cache.kv_waste < 1
    assert stats.cache.num_shared_tokens + stats.cache.num_copied_tokens == stats.cached_tokens


def test_failed_step_fails_its_sequences_and_the_engine_goes_on(engine):
    def explode(*_, **__):
        raise RuntimeError("no such kernel")

    model, predict = engine._runner.model, engine._runner.model.predict
    model.predict = explode
    with pytest.raises(DeviceError, match="no such kernel") as caught:
        engine.generate("hello", SHORT)
    assert isinstance(caught.value.__cause__, RuntimeError)
    model.predict = predict
    assert len(engine.generate("hello", SHORT).token_ids) == 5


def test_request_ends_with_its_deadline(engine):
    inbox = queue.Queue()
    engine.submit(GenerateRequest((1, 2, 3), LONG, timeout_s=0.05), inbox.put)
    assert isinstance(read(inbox)[-1], DeadlineExceeded)
    with pytest.raises(InvalidRequest, match="timeout_s must be in"):
        engine.submit(GenerateRequest((1, 2, 3), LONG, timeout_s=0), inbox.put)
    assert len(engine.generate("hello", SHORT).token_ids) == 5


def test_compiling_a_constraint_counts_for_the_deadline(engine, monkeypatch):
    grammars, get = engine.grammars, engine.grammars.get

    def slow(spec, **options):
        time.sleep(0.2)
        return get(spec, **options)

    monkeypatch.setattr(grammars, "get", slow)
    constrained = SamplingParams(max_tokens=4, grammar=GrammarSpec.regex("[ab]+"))
    with pytest.raises(DeadlineExceeded):
        engine.submit(GenerateRequest((1, 2, 3), constrained, timeout_s=0.1), print)
    inbox = queue.Queue()
    engine.submit(GenerateRequest((1, 2, 3), constrained, timeout_s=60), inbox.put)
    assert set(read(inbox)[-1].text) <= {"a", "b"}


def test_readers_exception_aborts_its_own_request_only(engine):
    def broken(item):
        raise ValueError("the reader is gone")

    engine.submit(GenerateRequest((1, 2, 3), LONG), broken)
    assert len(engine.generate("hello", SHORT).token_ids) == 5


def test_callback_may_ask_and_submit_but_not_wait(engine):
    answers, inbox = queue.Queue(), queue.Queue()

    def deliver(item):
        if isinstance(item, BaseException) or item.usage is not None:
            answers.put(engine.stats().num_running)
            engine.submit(GenerateRequest((1, 2), SHORT), inbox.put)
            with pytest.raises(RuntimeError, match="use submit"):
                engine.generate("hello", SHORT)
            answers.put("done")

    engine.submit(GenerateRequest((1, 2, 3), SHORT), deliver)
    assert isinstance(answers.get(timeout=30), int)
    assert answers.get(timeout=30) == "done"
    assert read(inbox)[-1].usage.output_tokens == 5


def test_constraint_that_meets_min_tokens_still_ends_complete(engine):
    sampling = SamplingParams(
        max_tokens=20, min_tokens=3, grammar=GrammarSpec.choice(["a", "abcdef"]), seed=1
    )
    assert engine.generate("x", sampling).text in ("a", "abcdef")


def test_broken_invariant_stops_the_engine_and_tells_everyone(folder):
    engine = Engine(folder, dtype="float32", checks="step", num_pages=200, threads=1)
    inbox = queue.Queue()
    with held_up(engine) as is_there:
        engine.submit(GenerateRequest((1, 2, 3), LONG), inbox.put)
        wait_until(is_there.is_set)
        engine._cache.pool.refs[150] += 1  # a reference that nobody owns
    assert isinstance(read(inbox)[-1], EngineStopped)
    with pytest.raises(EngineStopped, match="page 150"):
        engine.generate("hello", SHORT)
    engine.close()


def test_close_tells_those_who_wait_and_refuses_newcomers(folder):
    threads = NewThreads()
    engine = Engine(folder, dtype="float32", num_pages=200, threads=1)
    inbox = queue.Queue()
    with held_up(engine) as is_there:
        engine.submit(GenerateRequest((1, 2, 3), LONG), inbox.put)
        wait_until(is_there.is_set)
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: not engine.is_running)
    closing.join()
    engine.close()
    assert isinstance(read(inbox)[-1], EngineStopped)
    with pytest.raises(EngineStopped):
        engine.generate("hello")
    with pytest.raises(EngineStopped):
        engine.stats()
    assert "radixrt-engine" not in threads.names()


def test_every_waiter_is_told_even_when_the_owners_are_broken(folder):
    engine = Engine(folder, dtype="float32", num_pages=200, threads=1)
    inboxes = [queue.Queue() for _ in range(3)]

    def dying(item):
        raise SystemExit

    with held_up(engine) as is_there:
        for inbox in inboxes:
            engine.submit(GenerateRequest((1, 2, 3), LONG), inbox.put)
        engine.submit(GenerateRequest((4, 5), LONG), dying)
        wait_until(is_there.is_set)
        engine._cache.publish = None  # publishing, which every end needs, raises from now on
        engine._loop._inbox.append(lambda: 1 / 0)
    for inbox in inboxes:
        assert isinstance(read(inbox)[-1], EngineStopped)
    engine.close()


def test_forced_answer_of_exactly_the_pools_size_is_computed_or_refused(folder):
    grammar = GrammarSpec.choice(["abcdefghijklmnop"])
    with Engine(folder, dtype="float32", num_pages=6, page_size=4, threads=1) as engine:
        for length in range(1, 12):
            sampling = SamplingParams(max_tokens=16, grammar=grammar, logprobs=0)
            try:
                assert engine.generate([7] * length, sampling).text == "abcdefghijklmnop"
            except NeverFits:
                assert length > 4


def test_fork_of_the_process_is_told_that_it_has_no_engine(engine):
    child = os.fork()
    if child == 0:
        try:
            engine.generate("hello", SHORT)
        except EngineStopped:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_unread_stream_can_be_closed(engine):
    stream = engine.stream("hello", LONG)
    stream.close()
    assert list(stream) == []
    del stream
    engine.stream("hello", LONG)  # dropped at once
    assert engine.generate("hello", SHORT).finish_reason is FinishReason.LENGTH
    assert engine.stats().num_running == 0


def test_whoever_wants_only_the_output_is_woken_once(engine):
    async def main():
        loop, wake_ups = asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe

        def counted(*args):
            wake_ups.append(args)
            return call_soon(*args)

        loop.call_soon_threadsafe = counted
        return await AsyncEngine(engine).generate("hello", SHORT), wake_ups

    output, wake_ups = asyncio.run(main())
    assert output.token_ids == engine.generate("hello", SHORT).token_ids
    assert len(wake_ups) == 1


def test_an_output_that_cannot_be_put_together_is_told_and_its_request_is_aborted(engine):
    found = queue.SimpleQueue()
    request = engine.request("hello", replace(LONG, n=2))
    collector = OutputCollector(request.prompt_ids, num_samples=1)
    engine.submit(request, collector.deliver_to(found.put))
    assert isinstance(found.get(timeout=30), IndexError)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_interrupted_batch_aborts_all_its_requests(engine):
    class Interrupt(BaseException):
        pass

    def interrupt(number, frame):
        raise Interrupt

    def waits():
        place = sys._current_frames()[main_thread].f_code.co_name
        return engine._loop._num_open == 4 and place in ("generate", "<listcomp>")

    main_thread = threading.get_ident()
    original = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with held_up(engine):
            interrupting = act_once(waits, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(Interrupt):
                engine.generate(["a", "b", "c", "d"], LONG)
        interrupting.join()
    finally:
        signal.signal(signal.SIGUSR1, original)
    assert len(engine.generate("hello", SHORT).token_ids) == 5
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_stop_string_inside_a_forced_run_respects_min_tokens(engine):
    grammar = GrammarSpec.choice(["abcdefghijkl"])
    early = SamplingParams(max_tokens=30, min_tokens=8, stop=("b",), grammar=grammar)
    assert engine.generate("x", early).text == "abcdefghijkl"
    late = SamplingParams(max_tokens=30, min_tokens=8, stop=("i",), grammar=grammar)
    assert engine.generate("x", late).text == "abcdefgh"


def test_full_queue_refuses_one_more(folder):
    with Engine(folder, dtype="float32", num_pages=200, threads=1, max_waiting=1, max_running=1) as engine:
        inbox = queue.Queue()
        with held_up(engine):
            tickets = [engine.submit(GenerateRequest((1, 2, 3), LONG), inbox.put) for _ in range(2)]
            with pytest.raises(QueueFull):
                engine.generate("hello")
        for ticket in tickets:
            ticket.abort()


def test_whoever_has_an_answer_finds_its_place_in_the_queue_free(folder):
    with Engine(folder, dtype="float32", num_pages=200, threads=1, max_waiting=1, max_running=1) as engine:
        inbox = queue.Queue()

        def ask_again(item):
            if item.usage is not None:
                inbox.put(item)
                engine.submit(GenerateRequest((1, 2), SHORT), inbox.put)

        for _ in range(2):
            engine.submit(GenerateRequest((1, 2, 3), SHORT), ask_again)
        num_answers = 0
        while num_answers < 4:
            item = inbox.get(timeout=60)
            assert not isinstance(item, BaseException), item
            num_answers += item.usage is not None
        assert engine.stats().num_finished_requests == 4


def test_an_error_on_the_way_to_text_reaches_the_reader(engine, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("radixrt.delivery.Detokenizer.push", broken)
        with pytest.raises(ZeroDivisionError):
            engine.generate("hello", SHORT)
    assert len(engine.generate("hello", SHORT).token_ids) == 5


@pytest.mark.parametrize("marks", [None, PLAIN_FORMS["hermes"].marks])
def test_a_stop_string_that_comes_with_the_last_token_is_why_the_text_ends(engine, marks):
    """Also if it might have begun a call."""
    sampling = SamplingParams(max_tokens=1, temperature=0, logit_bias={ord("<"): 100.0}, stop=("<",))
    inbox = queue.Queue()
    engine.submit(GenerateRequest((1, 2, 3), sampling, call_marks=marks), inbox.put)
    [chunk] = read(inbox)
    assert (chunk.text, chunk.finish_reason) == ("", FinishReason.STOP)


def test_a_bug_between_an_answer_and_its_reader_is_told(folder, monkeypatch):
    with Engine(folder, dtype="float32", num_pages=200, threads=1) as engine:

        def broken(*_):
            raise InvariantViolation("injected")

        monkeypatch.setattr(engine._loop._scheduler, "finish", broken)
        inbox = queue.Queue()
        stopped = SamplingParams(max_tokens=30, grammar=GrammarSpec.regex("a{20,}"), stop=("aaa",))
        engine.submit(GenerateRequest((1, 2, 3), stopped), inbox.put)
        assert isinstance(read(inbox)[-1], EngineStopped)


def test_async_generate_stream_and_cancellation(engine):
    async def main():
        client = AsyncEngine(engine)
        whole, other = await asyncio.gather(client.generate("hello", SHORT), client.generate("bye", SHORT))
        chunks = [chunk async for chunk in client.stream("hello", SHORT)]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert len(other.token_ids) == 5
        task = asyncio.create_task(client.generate("hello", LONG))
        with held_up(engine) as is_there:
            await asyncio.to_thread(wait_until, is_there.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert engine.generate("hello", SHORT).finish_reason is FinishReason.LENGTH


def test_async_engine_refuses_options_beside_an_engine(engine):
    with pytest.raises(InvalidRequest, match="options"):
        AsyncEngine(engine, page_size=4)


def test_concurrent_threads_get_their_own_answers(engine):
    expected = {text: engine.generate(text, SHORT).token_ids for text in "abcdefgh"}
    results = {}

    def work(text):
        results[text] = engine.generate(text, SHORT).token_ids

    threads = [threading.Thread(target=work, args=(text,)) for text in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == expected
