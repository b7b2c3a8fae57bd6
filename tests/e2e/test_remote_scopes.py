"""Programs on a server keep their live branches' prefixes there, and let go of them whatever happens."""

import asyncio
import threading
import time

import pytest

from frontend_lang import HttpBackend, ProgramError, RemoteUnavailable, gen, program
from frontend_lang.backends.remote_scopes import RemoteScopes
from radixrt import Engine
from radixrt.config import ServerConfig
from radixrt.server import create_app
from tests.support.chat_server import Answer, serving
from tests.support.models import tiny_model
from tests.support.servers import listening
from tests.support.threads import wait_until
from tests.support.tokenizers import byte_tokenizer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("models") / "tiny", tokenizer=byte_tokenizer(chat=True)
    )
    with Engine(folder, dtype="float32", kernels="torch", num_pages=1024, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig())


@pytest.fixture(scope="module")
def url(app):
    with listening(app) as (_, url):
        yield url


@pytest.fixture
def backend(url, engine):
    backend = HttpBackend(url, engine.tokenizer, max_retries=0)
    yield backend
    assert num_open(engine) == (0, 0)
    engine.check()


def num_open(engine):
    cache = engine.stats().cache
    return cache.num_scopes, cache.num_held_pages


def test_live_branches_are_held_and_closed_with_the_run(backend, engine):
    seen = []

    @program
    def forked(s):
        s += "a long enough beginning " * 3 + gen("a", max_tokens=4)
        branches = s.fork(3)
        branches += gen("b", max_tokens=4)
        branches[0].text(), branches[1].text(), branches[2].text()
        seen.append(num_open(engine))
        branches.join()
        s += gen("c", max_tokens=4)  # carries the word that the branches are joined
        s.text()
        seen.append(num_open(engine))

    forked.with_options(backend=backend).run()
    (live, held), (joined, _) = seen
    assert (live, joined) == (4, 1)
    assert held > 0


def test_they_are_closed_when_the_program_raises(backend, engine):
    @program
    def wrong(s):
        s += "a" + gen("a", max_tokens=4)
        s.text()
        assert num_open(engine)[0] == 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        wrong.with_options(backend=backend).run()


@program
def slow(s):
    branches = s.fork(2)
    branches += "slow " + gen("a", max_tokens=500, ignore_eos=True)
    return [branch["a"] for branch in branches]


def test_they_are_closed_when_the_caller_is_cancelled(backend, engine):
    async def main():
        task = asyncio.create_task(slow.with_options(backend=backend).arun())
        while num_open(engine)[0] < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_open(engine)[0] == 0

    asyncio.run(main())


def test_they_are_closed_when_the_time_is_over(backend, engine):
    with pytest.raises(ProgramError):
        slow.with_options(backend=backend, timeout_s=0.1).run()


def test_they_are_closed_when_a_stream_is_left(backend, engine):
    with slow.with_options(backend=backend).stream() as events:
        next(iter(events))


def test_many_programs_at_once_leave_none(backend, engine):
    @program
    def small(s, number):
        s += f"{number}" + gen("a", max_tokens=2)
        branches = s.fork(2)
        branches += gen("b", max_tokens=2)

    outcomes = small.with_options(backend=backend).map([(number,) for number in range(30)])
    assert all(outcome.unwrap() for outcome in outcomes)


def test_a_scope_that_the_server_has_forgotten_is_opened_again(backend, engine, app):
    @program
    def long(s):
        s += "a" + gen("a", max_tokens=2)
        s.text()
        for scopes in app.state.service.scopes._scopes.values():
            while scopes:
                scopes.popitem()[1].scope.close()
        assert num_open(engine)[0] == 0
        s += "b" + gen("b", max_tokens=2)
        s.text()
        assert num_open(engine)[0] == 1

    long.with_options(backend=backend).run()


def test_more_branches_than_a_client_may_have_scopes_all_get_their_answers(backend, engine):
    @program
    def wide(s):
        branches = s.fork(300)
        branches += "x" + gen("a", max_tokens=1)
        return [branch["a"] for branch in branches]

    assert len(wide.with_options(backend=backend).run().value) == 300


def test_a_server_that_dies_ends_the_run_soon_and_with_its_error(engine):
    app = create_app(engine, ServerConfig())
    started = time.monotonic()

    @program
    def two(s, server):
        s += "a" + gen("a", max_tokens=2)
        s.text()
        server.force_exit = server.should_exit = True
        while server.started and server.servers and server.servers[0].is_serving():
            time.sleep(0.01)
        s += "b" + gen("b", max_tokens=2)
        return s["b"]

    with listening(app) as (server, url):
        backend = HttpBackend(url, engine.tokenizer, max_retries=0)
        with pytest.raises(ProgramError) as caught:
            two.with_options(backend=backend).run(server)
    app.state.service.close()  # its end was forced: it let go of nothing
    assert isinstance(caught.value.__cause__, RemoteUnavailable)
    assert time.monotonic() - started < 20
    assert len(backend._scopes) == 0


def test_a_server_that_hangs_when_told_of_closed_scopes_does_not_hold_up_the_result(engine, monkeypatch):
    """The run waits for it, but not long; its result is there."""
    monkeypatch.setattr("frontend_lang.backends.http.SETTLE_S", 1.0)
    hung = threading.Event()
    chunk = {"sample_index": 0, "text": "ok", "token_ids": [7], "finish_reason": "length", "usage": {}}
    answers = (Answer([chunk, "[DONE]"]), Answer(["x"], wait=lambda: hung.wait(20)))

    @program
    def one(s):
        s += "a" + gen("a", max_tokens=2)

    try:
        with serving(*answers) as server:
            server.info = {"fingerprint": engine.tokenizer.fingerprint}
            backend = HttpBackend(server.url, engine.tokenizer, max_retries=0)
            started = time.monotonic()
            assert one.with_options(backend=backend).run()["a"] == "ok"
            assert time.monotonic() - started < 15
            wait_until(lambda: len(server.bodies) > 1)
            assert list(server.bodies[1]) == ["scopes"]
            hung.set()
    finally:
        hung.set()


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_server_that_refuses_to_close_them_spoils_no_result(engine, status):
    chunk = {"sample_index": 0, "text": "ok", "token_ids": [7], "finish_reason": "length", "usage": {}}
    answers = (Answer([chunk, "[DONE]"]), Answer(status=status, body={"error": {"message": "no"}}))

    @program
    def one(s):
        s += "a" + gen("a", max_tokens=2)

    with serving(*answers) as server:
        server.info = {"fingerprint": engine.tokenizer.fingerprint}
        backend = HttpBackend(server.url, engine.tokenizer, max_retries=0)
        assert one.with_options(backend=backend).run()["a"] == "ok"
        assert len(server.bodies) == 2


def test_a_server_is_told_of_closed_scopes_once_and_only_of_those_it_knows():
    scopes = RemoteScopes()
    ids = [scopes.open() for _ in range(600)]
    assert len(scopes) == 0
    names = [scopes.name(scope_id) for scope_id in ids[:500]]
    assert scopes.name(ids[0]) == names[0]
    assert len(set(names)) == len(scopes) == 500
    for scope_id in ids:
        scopes.close(scope_id)
    told = [scopes.take_closed() for _ in range(3)]
    assert [len(part) for part in told] == [256, 244, 0]
    assert told[0] + told[1] == names
    assert len(scopes) == 0
