"""Scopes by name: opened by the request that needs them, closed together, bounded, and nobody else's business."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from radixrt.engine import Engine
from radixrt.errors import InvalidRequest
from radixrt.server import create_app
from radixrt.server.scopes import MAX_CLOSED_PER_TENANT, MAX_SCOPES_PER_TENANT, OpenScopes
from tests.support.asking import post, run
from tests.support.servers import client_of

GREEDY = {"max_tokens": 2, "temperature": 0}
TWO_KEYS = {"api_keys": "a=key-number-1,b=key-number-2"}
KEY_1, KEY_2 = ({"Authorization": f"Bearer key-number-{number}"} for number in (1, 2))


@pytest.fixture(scope="module")
def engine(model_folder):
    """Give an engine whose scopes are those of these tests only."""
    options = {"device": "cpu", "dtype": "float32", "kernels": "torch", "checks": "step"}
    with Engine(model_folder, num_pages=2048, **options) as engine:
        yield engine


def num_scopes(engine):
    return engine.stats().cache.num_scopes


def asked(name, **more):
    return {"prompt": "held " * 30, **GREEDY, "scope": name, "scope_ttl_s": 100, **more}


@pytest.fixture(autouse=True)
def _leaves_none(engine):
    assert num_scopes(engine) == 0
    yield
    assert num_scopes(engine) == 0


def close(http, *names, **options):
    return http.post("/scopes/close", json={"scopes": list(names)}, **options)


def test_a_request_opens_the_scope_it_names_and_the_next_one_uses_it(engine):
    async def work(http):
        for _ in range(2):
            assert (await http.post("/generate", json=asked("mine"))).status_code == 200
            assert num_scopes(engine) == 1
        assert engine.stats().cache.num_held_pages > 0
        assert (await close(http, "mine", "other", "mine")).json() == {"num_closed": 1}
        assert (num_scopes(engine), engine.stats().cache.num_held_pages) == (0, 0)
        late = await http.post("/generate", json=asked("mine"))  # sent before it was closed, perhaps
        assert late.status_code == 200
        assert (num_scopes(engine), engine.stats().cache.num_held_pages) == (0, 0)

    run(engine, work)


def test_a_scope_that_is_closed_before_its_first_request_comes_is_not_opened_by_it(engine):
    async def work(http):
        await close(http, "overtaken")
        assert (await http.post("/generate", json=asked("overtaken"))).status_code == 200
        assert num_scopes(engine) == 0

    run(engine, work)


@pytest.mark.parametrize("change", [{}, {"prompt": None}])
def test_a_request_closes_what_it_is_told_even_if_it_is_refused(engine, change):
    async def work(http):
        for name in ("a", "b"):
            await http.post("/generate", json=asked(name))
        answer = await http.post("/generate", json=asked("c", closed_scopes=["a", "b", "no"], **change))
        assert answer.status_code == (200 if not change else 400)
        assert num_scopes(engine) == (1 if not change else 0)
        await close(http, "c")

    run(engine, work)


def test_a_name_is_nobody_elses(engine):
    async def work(http):
        await http.post("/generate", json=asked("shared"), headers=KEY_1)
        held = engine.stats().cache.num_held_pages
        refused = await http.post(
            "/generate", json={"prompt": "x", **GREEDY, "scope": "shared"}, headers=KEY_2
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scope")
        await http.post("/generate", json=asked("shared"), headers=KEY_2)  # its own of that name
        assert num_scopes(engine) == 2
        assert (await close(http, "shared", headers=KEY_2)).json() == {"num_closed": 1}
        assert (num_scopes(engine), engine.stats().cache.num_held_pages) == (1, held)
        assert (await close(http, "shared", headers=KEY_2)).json() == {"num_closed": 0}
        assert (await http.delete("/scopes/shared", headers=KEY_2)).json()["was_open"] is False
        body = {"prompt": "x", **GREEDY, "closed_scopes": ["shared"]}
        await http.post("/generate", json=body, headers=KEY_2)
        assert (num_scopes(engine), engine.stats().cache.num_held_pages) == (1, held)
        await http.post("/generate", json=asked("shared"), headers=KEY_1)  # what another closed is open here
        assert num_scopes(engine) == 1
        assert (await close(http, "shared", headers=KEY_1)).json() == {"num_closed": 1}

    run(engine, work, **TWO_KEYS)


def test_one_client_cannot_open_more_than_its_share(engine):
    async def work(http):
        for number in range(MAX_SCOPES_PER_TENANT + 20):
            body = {"prompt_ids": [5], "max_tokens": 1, "scope": f"s{number}", "scope_ttl_s": 100}
            assert (await http.post("/generate", json=body)).status_code == 200
        assert num_scopes(engine) == MAX_SCOPES_PER_TENANT
        names = [f"s{number}" for number in range(20, MAX_SCOPES_PER_TENANT + 20)]
        assert (await close(http, "s0", "s19")).json() == {"num_closed": 0}  # those used longest ago
        assert (await close(http, *names)).json() == {"num_closed": len(names)}

    run(engine, work)


HOSTILE = {
    "ttl 0": ({"scope": "x", "scope_ttl_s": 0}, "scope_ttl_s"),
    "ttl below 0": ({"scope": "x", "scope_ttl_s": -1}, "scope_ttl_s"),
    "ttl of a string": ({"scope": "x", "scope_ttl_s": "long"}, "scope_ttl_s"),
    "no scope": ({"scope_ttl_s": 5}, "scope_ttl_s"),
    "long name": ({"scope": "x" * 257, "scope_ttl_s": 5}, "scope"),
    "unknown": ({"scope": "scope_0"}, "scope"),
    "many closed": ({"closed_scopes": ["x"] * (MAX_SCOPES_PER_TENANT + 1)}, "closed_scopes"),
    "closed number": ({"closed_scopes": [5]}, "closed_scopes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_scope_is_refused_by_name(engine, case):
    change, name = HOSTILE[case]
    answer = post(engine, "/generate", {"prompt": "x", **GREEDY, **change})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["param"]


@pytest.mark.parametrize("body", [{}, {"scopes": "x"}, {"scopes": ["x"] * 257}, {"scopes": ["x" * 257]}])
def test_what_cannot_be_closed_is_refused(engine, body):
    assert post(engine, "/scopes/close", body).status_code == 400


def test_a_lifetime_is_at_most_what_the_server_allows(engine, monkeypatch):
    scopes, ahead_s = engine._cache.scopes, -100.0
    expire = scopes.expire
    monkeypatch.setattr(scopes, "expire", lambda now_s: expire(now_s + ahead_s))

    async def work(http):
        nonlocal ahead_s
        assert (await http.post("/generate", json=asked("x", scope_ttl_s=1e300))).status_code == 200
        assert num_scopes(engine) == 1
        ahead_s = 100.0
        await http.post(
            "/generate", json={"prompt": "another", **GREEDY}
        )  # a step looks for what has run out
        assert num_scopes(engine) == 0

    run(engine, work, max_retention_s=1)


def test_a_server_that_ends_leaves_no_scope_to_an_engine_that_goes_on(engine):
    async def work():
        app = create_app(engine)
        async with app.router.lifespan_context(app), client_of(app) as http:
            await http.post("/generate", json=asked("mine"))
            await http.post("/generate", json={**asked("kept"), "prompt_cache_options": {"ttl": "1h"}})
            await http.post("/scopes", json={})
            assert num_scopes(engine) == 4
        assert (num_scopes(engine), engine.stats().cache.num_held_pages) == (0, 0)

    asyncio.run(work())


class Opened:
    """A scope of no engine."""

    def __init__(self, scope_id, alive):
        self.scope_id, self.alive = scope_id, alive
        alive.add(scope_id)

    def close(self):
        self.alive.discard(self.scope_id)


def table(clock):
    alive, numbers = set(), iter(range(10**6))
    return OpenScopes(lambda ttl_s: Opened(next(numbers), alive), clock=clock), alive


def test_a_scope_that_ran_out_is_forgotten():
    now = [0.0]
    scopes, alive = table(lambda: now[0])
    name = scopes.open("a", ttl_s=10)
    now[0] = 9.0
    first = scopes.scope_id("a", name)
    now[0] = 18.0  # it was used in between
    assert scopes.scope_id("a", name) == first
    now[0] = 29.0
    with pytest.raises(InvalidRequest, match="not used for too long"):
        scopes.scope_id("a", name)
    assert (len(scopes), alive) == (0, set())
    assert scopes.scope_id("a", name, ttl_s=5) != first


@pytest.mark.parametrize("seed", range(5))
def test_what_is_open_here_is_open_in_the_engine_whatever_is_asked(seed):
    chance, now, most = random.Random(seed), [0.0], 0
    scopes, alive = table(lambda: now[0])
    names = [f"n{number}" for number in range(400)]
    for _ in range(3000):
        tenant = chance.choice("ab")
        now[0] += chance.random()
        match chance.randrange(4):
            case 0:
                names.append(scopes.open(tenant, ttl_s=chance.uniform(1, 500)))
            case 1:
                scopes.scope_id(tenant, chance.choice(names), ttl_s=chance.uniform(1, 500))
            case 2:
                scopes.close(tenant, closed := chance.sample(names, 2))
                assert [scopes.scope_id(tenant, name, ttl_s=5) for name in closed] == [None, None]
                names.extend(f"m{len(names)}" for _ in range(2))
            case 3:
                with suppress(InvalidRequest):
                    scopes.scope_id(tenant, chance.choice(names))
        assert len(scopes) == len(alive) <= 2 * MAX_SCOPES_PER_TENANT
        most = max(most, len(scopes))
    assert most > MAX_SCOPES_PER_TENANT / 2


def test_the_names_of_closed_scopes_are_bounded_and_the_oldest_are_forgotten_first():
    scopes, alive = table(lambda: 0.0)
    scopes.close("a", [f"n{number}" for number in range(MAX_CLOSED_PER_TENANT + 1)])
    assert scopes.scope_id("a", "n1", ttl_s=5) is None
    assert scopes.scope_id("a", "n0", ttl_s=5) in alive
    assert scopes.scope_id("b", "n1", ttl_s=5) in alive
