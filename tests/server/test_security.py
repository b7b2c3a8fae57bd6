"""What the server must be immune to: rules 1 to 12, each at least one test. The others: test_security_more.py.

Rule 3 (files of keys and values) is tested where such files are written, not here.
"""

from __future__ import annotations

import ast
import asyncio
import hmac
import json
import threading
import time
from datetime import datetime
from pathlib import Path

import jinja2.sandbox
import psutil
import pytest
from pydantic import ValidationError

from radixrt.config import ServerConfig
from radixrt.errors import InvalidRequest
from radixrt.server import create_app
from radixrt.server.app import BODIES as BODIES_OF_ALL_ROUTES
from radixrt.server.bodies_chat import ChatBody
from radixrt.server.bodies_completions import CompletionBody
from radixrt.server.bodies_native import GenerateBody
from radixrt.server.reading import parse_body
from radixrt.server.security import KeyRing
from radixrt.text.chat import ChatTemplate
from tests.support import asking
from tests.support.asking import get, post, run
from tests.support.servers import client_of, scope_of
from tests.support.workers import stopped

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for room in ("radixrt", "frontend_lang", "kernels") for path in sorted((ROOT / room).rglob("*.py"))
]
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
TWO_KEYS = {"api_keys": "a=key-number-1,b=key-number-2"}
KEY_1, KEY_2 = ({"Authorization": f"Bearer key-number-{number}"} for number in (1, 2))


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


# -- 1. no code from data ------------------------------------------------------------------------------------


def test_nothing_loads_code_from_data():
    banned_imports = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
    banned_calls = {
        "eval",
        "exec",
        "torch.load",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "numpy.load",
        "np.load",
    }
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert not banned_imports & {name.partition(".")[0] for name in imports(tree)}, path
        assert not banned_calls & set(calls(tree)), path


# -- 2. no open sockets --------------------------------------------------------------------------------------


def test_default_bind_is_loopback_and_an_engine_opens_no_socket(engine):
    assert ServerConfig().host == "127.0.0.1"
    mine = psutil.Process()
    children = mine.children(recursive=True)  # but for the servers of other tests
    for process in (mine, *(child for child in children if "serve" not in child.cmdline())):
        assert not [item for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN]
    for path in SOURCES:
        found = set(imports(ast.parse(path.read_text())))
        assert not {"zmq", "multiprocessing.connection", "xmlrpc", "socketserver"} & found, path


# -- 3. no file of pages or prefixes -------------------------------------------------------------------------


def test_pages_and_prefixes_live_in_memory_only():
    """No file, so none that could be forged: whoever adds one adds its checks and this rule's tests."""
    file_calls = {
        "open",
        "io.open",
        "os.open",
        "torch.save",
        "np.save",
        "np.memmap",
        "torch.from_file",
        "save_file",
    }
    file_imports = {"mmap", "safetensors", "pathlib", "tempfile", "shutil", "sqlite3", "io", "os"}
    for path in (ROOT / "radixrt" / "kv").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not file_imports & {name.partition(".")[0] for name in imports(tree)}, path
        assert not file_calls & set(calls(tree)), path


# -- 4. templates --------------------------------------------------------------------------------------------


def on_event_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_templates_are_sandboxed_bounded_and_run_off_the_event_loop(engine):
    threads: list[str] = []

    def clock():
        threads.append(threading.current_thread().name)
        assert not on_event_loop()
        return datetime(2026, 1, 1)

    source = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    usual, engine.tokenizer.chat = engine.tokenizer.chat, ChatTemplate(source, clock=clock)
    try:
        assert post(engine, CHAT, GREEDY).status_code == 200
        engine.tokenizer.chat = ChatTemplate("{% for i in range(10**5) %}{{ 'x' * 10**4 }}{% endfor %}")
        started = time.monotonic()
        assert post(engine, CHAT, GREEDY).status_code == 400
        assert time.monotonic() - started < 20
        engine.tokenizer.chat = ChatTemplate("{{ messages.__class__.__mro__ }}{{ ''.__class__ }}")
        assert post(engine, CHAT, GREEDY).status_code == 400
    finally:
        engine.tokenizer.chat = usual
    assert any(name.startswith("radixrt-text") for name in threads)
    assert isinstance(usual._template.environment, jinja2.sandbox.ImmutableSandboxedEnvironment)


@pytest.mark.parametrize(
    ("field", "value"), [("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}), ("chat_template_kwargs", {"tokenize": True}), ("chat_template_kwargs", {"tools": []})]
)  # fmt: skip
def test_no_template_comes_from_a_request(engine, field, value):
    assert post(engine, CHAT, {**GREEDY, field: value}).status_code == 400


# -- 5. no code of model repositories ------------------------------------------------------------------------


def test_trust_remote_code_does_not_exist(engine):
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.arg]
                if isinstance(node, ast.keyword)
                else [node.id]
                if isinstance(node, ast.Name)
                else []
            )
            assert "trust_remote_code" not in names, path
    assert post(engine, CHAT, {**GREEDY, "trust_remote_code": True}).status_code == 400


# -- 6. keys -------------------------------------------------------------------------------------------------


def all_routes(routes):
    for route in routes:
        if hasattr(route, "original_router"):
            yield from all_routes(route.original_router.routes)
        else:
            yield route


def test_every_route_but_health_needs_a_key(engine):
    app = create_app(engine, ServerConfig(api_keys="key-number-1"))
    routes = [(route.path, method) for route in all_routes(app.routes) for method in route.methods]
    assert len(routes) > 15

    async def go():
        async with client_of(app) as http:
            for path, method in routes:
                response = await http.request(method, path.replace("{", "").replace("}", ""))
                if path == "/health":
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (path, method)
                if method != "HEAD":
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                assert response.headers["www-authenticate"] == "Bearer"
            for path in (
                "/health/",
                "//health",
                "/HEALTH",
                "/health%2f",
                "/health/../v1/models",
                "/nowhere",
                "/v1/models?x=/health",
            ):
                assert (await http.get(path)).status_code == 401, path
            for key in ("", "key", "key-number-1x", "KEY-NUMBER-1", "key-number-1, key-number-1"):
                response = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == 401, key
            good = {"Authorization": "Bearer key-number-1"}
            assert (await http.get("/v1/models", headers=good)).status_code == 200
            assert (await http.get("/nowhere", headers=good)).status_code == 404
            assert (await http.get("/v1/chat/completions", headers=good)).status_code == 405

    asyncio.run(go())


def test_websockets_are_closed_at_the_gate(engine):
    app, sent = create_app(engine, ServerConfig(api_keys="key-number-1")), []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(app({**scope_of("GET", "/health"), "type": "websocket"}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_keys_are_compared_all_and_in_constant_time(monkeypatch):
    ring, compared = KeyRing({"key-number-1": "a", "key-number-2": "b"}), []
    real = hmac.compare_digest
    monkeypatch.setattr(
        hmac,
        "compare_digest",
        lambda left, right: compared.append((len(left), len(right))) or real(left, right),
    )
    for key, name in (("key-number-1", "a"), ("key-number-2", "b"), ("key", None), ("x" * 10_000, None)):
        compared.clear()
        tenant = ring.tenant(f"Bearer {key}")
        assert (tenant.name if tenant else None) == name
        assert compared == [(32, 32)] * 2  # digests of equal length, every one of them


def test_keys_come_from_a_file_and_a_missing_one_is_an_error(engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# keys\nalice=key-number-1\n\nkey-number-2\n")
    assert get(engine, "/v1/models", api_key_file=str(path)).status_code == 401
    assert get(engine, "/v1/models", headers=KEY_2, api_key_file=str(path)).status_code == 200
    for config in (
        ServerConfig(api_key_file=str(tmp_path / "none")),
        ServerConfig(api_keys=""),
        ServerConfig(api_keys="short"),
        ServerConfig(api_keys="alice=key-number-1,bob=key-number-1"),
    ):
        with pytest.raises(InvalidRequest):
            KeyRing.load(config)


# -- 7. nothing administrative without a key -----------------------------------------------------------------


def test_no_route_resets_or_administers(engine):
    app = create_app(engine, ServerConfig())
    paths = {route.path for route in all_routes(app.routes)}
    words = (
        "flush",
        "reset",
        "clear",
        "admin",
        "load",
        "update",
        "profile",
        "debug",
        "abort_all",
        "config",
        "sleep",
        "exec",
    )
    assert not [path for path in paths for word in words if word in path]
    deletes = {route.path for route in all_routes(app.routes) if "DELETE" in route.methods}
    assert deletes == {"/generate/{name}", "/scopes/{name}"}  # one's own streams and scopes


# -- 8. every number has a maximum ---------------------------------------------------------------------------

HUGE = 2**80
BODIES = {
    CHAT: (ChatBody, GREEDY),
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/generate": (GenerateBody, {"prompt": "x"}),
}


def numeric_fields(kind):
    for name, info in kind.model_fields.items():
        if any(word in str(info.annotation) for word in ("int", "float")) and name not in (
            "prompt",
            "prompt_ids",
        ):
            yield name, "list[int]" in str(info.annotation), "dict" in str(info.annotation)


@pytest.mark.parametrize("path", BODIES)
def test_no_number_is_unbounded(engine, path):
    kind, body = BODIES[path]
    fields = list(numeric_fields(kind))
    assert len(fields) > 12

    async def work(http):
        for name, is_list, is_dict in fields:
            for value in (HUGE, -HUGE):
                given = [value] if is_list else {str(value): value} if is_dict else value
                response = await http.post(path, json={**body, name: given})
                assert response.status_code == 400, (name, value)
                assert response.json()["error"]["param"].startswith((name, "min_tokens")), name

    run(engine, work)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129},
        {"stop": ["x"] * 17},
        {"stop": "x" * 257},
        {"logit_bias": {str(number): 1 for number in range(1025)}},
        {"logprobs": True, "top_logprobs": 21},
        {"messages": HELLO * 4097},
        {"metadata": {str(number): "x" for number in range(17)}},
        {"user": "x" * 513},
        {"structured_outputs": {"choice": [str(number) for number in range(10_001)]}},
        {"structured_outputs": {"choice": ["x" * 1_100_000]}},
        {"structured_outputs": {"grammar": "start: " + "x" * 1_100_000}},
        {"structured_outputs": {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(30_000)), 'r30000: "b"'])}},
        {"regex": "a{1,1000}{1,1000}"},
        {"regex": "x" * 1_100_000},
        {"structured_outputs": {"json": {"title": "x" * 1_100_000}}},
        {"structured_outputs": {"json": {"enum": list(range(400_000))}}},
        {"structured_outputs": {"json": {"anyOf": [{"properties": {f"k{i}": {}}} for i in range(30)], "unevaluatedProperties": False}}},
        {"radixrt": {"timeout_s": 1e9}},
        {"radixrt": {"timeout_s": float("inf")}},
        {"radixrt": {"label": "x" * 513}},
    ],
    ids=lambda fields: str(fields)[:40],  # pytest puts the id into the environment, which has a limit too
)  # fmt: skip
def test_sizes_have_limits(engine, fields):
    body = json.dumps({**GREEDY, **fields})
    response = run(
        engine, lambda http: http.post(CHAT, content=body, headers={"content-type": "application/json"})
    )
    assert response.status_code == 400
    assert len(response.content) < 5000


def test_bytes_of_body_and_headers_have_limits(engine):
    body = {**GREEDY, "messages": [{"role": "user", "content": "x" * 5000}]}
    assert post(engine, CHAT, body, max_body_bytes=4096).status_code == 413
    assert get(engine, "/v1/models", headers={"x-a": "y" * 5000}, max_header_bytes=4096).status_code == 431

    async def work(http):  # without a content length

        async def parts():
            for _ in range(100):
                yield b" " * 1000

        return await http.post(CHAT, content=parts(), headers={"content-type": "application/json"})

    assert run(engine, work, max_body_bytes=4096).status_code == 413


def test_a_slow_body_is_given_up(engine):
    async def work(http):
        async def parts():
            yield b'{"messages": '
            await asyncio.sleep(5)
            yield b"[]}"

        return await http.post(CHAT, content=parts(), headers={"content-type": "application/json"})

    assert run(engine, work, body_timeout_s=1).status_code == 408


# -- 9. depth before recursion -------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":[', b'["\\"[",'])
def test_depth_is_checked_on_the_raw_text(engine, opening):
    raw = opening * 200_000
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="nested"):
        parse_body(raw, ChatBody)
    assert time.monotonic() - started < 5


def test_brackets_in_strings_are_no_depth(engine):
    content = '[{"\\' * 500
    answer = post(
        engine, CHAT, {**GREEDY, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", BODIES_OF_ALL_ROUTES, ids=lambda kind: kind.__name__)
def test_a_million_faults_cost_no_more_than_a_few(kind):
    for name in kind.model_fields:
        for wrong in ([{}] * 3000, [[None]] * 3000, {str(number): {} for number in range(3000)}):
            raw = json.dumps({name: wrong}).encode()
            with pytest.raises(ValidationError) as caught:
                kind.model_validate_json(raw)
            is_list = isinstance(wrong, list)
            assert not is_list or caught.value.error_count() < 50, name
            with pytest.raises(InvalidRequest) as refused:
                parse_body(raw, kind)
            if caught.value.error_count() > 1000:
                assert str(refused.value) == f"the body breaks {caught.value.error_count()} rules"


def test_a_schema_as_text_is_checked_too(engine):
    for depth in (100, 100_000):
        text = '{"items":' * depth + "{}" + "}" * depth
        response = post(engine, CHAT, {**GREEDY, "structured_outputs": {"json": text}})
        assert response.status_code == 400


# -- 10, 11, 12. constraints ---------------------------------------------------------------------------------


def test_a_hostile_constraint_costs_one_400_and_nobody_else_waits(engine):
    hostile = {
        **GREEDY,
        "structured_outputs": {"json": {"type": "string", "not": {"pattern": "^(a|b)*a(a|b){30}$"}}},
    }
    workers = engine.grammars._workers

    async def work(http):
        with stopped(workers._quick, workers._patient):  # it is as slow as the others need it
            slow = asyncio.create_task(http.post(CHAT, json=hostile))
            for _ in range(3):
                assert (await http.get("/health")).status_code == 200
                assert (await http.post(CHAT, json={**GREEDY, "max_tokens": 1})).status_code == 200
            assert not slow.done()
        first = await slow
        before = engine.stats().grammar.compilations
        again = await http.post(CHAT, json=hostile)
        return first.status_code, again.status_code, before

    first, again, before = run(engine, work)
    after = engine.stats().grammar.compilations
    assert (first, again) == (400, 400)
    assert (after.num_refused, after.num_cached) == (before.num_refused, before.num_cached + 1)  # remembered
    assert engine.is_running
    engine.check()


def test_the_constraint_of_a_tenant_counts_for_its_own_share(engine):
    """The shares themselves: tests/grammar/test_cache.py."""
    for number, header in ((1, KEY_1), (2, KEY_2)):
        body = {**GREEDY, "max_tokens": 16, "regex": f"share{number}"}
        assert post(engine, CHAT, body, headers=header, **TWO_KEYS).status_code == 200
    owners = {spec.text: owner for spec, owner in engine.grammars._owners.items()}
    assert (owners["share1"], owners["share2"]) == ("a", "b")


def test_a_failed_compilation_never_reaches_the_loop(engine):
    steps = engine.stats().num_steps
    for fields in (
        {"regex": "(a"},
        {"structured_outputs": {"grammar": "start: nope"}},
        {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
    ):
        assert post(engine, CHAT, {**GREEDY, **fields}).status_code == 400
    assert engine.stats().num_steps == steps
    engine.check()
    assert asking.chat_in_process(engine, HELLO, max_tokens=2).token_ids
