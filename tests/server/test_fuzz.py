"""Random bodies over every route that takes one: never a 5xx, and the engine stays whole.

A body begins as a valid one, so that the mutations reach deep; the rules of each field are in its model.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.config import ServerConfig
from radixrt.server import create_app
from radixrt.server.app import BODIES
from tests.support.servers import client_of

HELLO = [{"role": "user", "content": "Hi"}]
VALID = {
    "/v1/chat/completions": ("ChatBody", {"messages": HELLO, "max_tokens": 2}),
    "/v1/completions": ("CompletionBody", {"prompt": "Hi", "max_tokens": 2}),
    "/v1/responses": ("ResponsesBody", {"input": "Hi", "max_output_tokens": 16}),
    "/v1/decisions": (
        "DecisionBody",
        {"input": "x", "questions": [{"type": "predicate", "instructions": "?"}]},
    ),
    "/generate": ("GenerateBody", {"prompt": "Hi", "max_tokens": 2}),
    "/explain": ("ExplainBody", {"prompt": "Hi"}),
    "/tokenize": ("TokenizeBody", {"prompt": "Hi"}),
    "/detokenize": ("DetokenizeBody", {"tokens": [1, 2]}),
    "/open_role": ("OpenRoleBody", {"history": ["user"], "role": "assistant"}),
    "/scopes": ("ScopeBody", {"ttl_s": 1}),
    "/scopes/close": ("CloseScopesBody", {"scopes": ["a"]}),
}
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**70), 1e308, -0.5, 0.5]),
    st.sampled_from(["", "a", "auto", "json_object", "[a-c]{2}", "start: 'x'", "root ::= \"x\"", "(", "user", "\x00", "<|im_end|>", "30m"]),
    st.text(max_size=8),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "json", "schema", "text", "a"]), inner, max_size=3), max_leaves=6)  # fmt: skip


def test_every_route_with_a_body_is_fuzzed_here(engine):
    paths = create_app(engine, ServerConfig()).openapi()["paths"]
    with_bodies = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert with_bodies == set(VALID)


@pytest.mark.parametrize("path", VALID)
def test_no_body_is_a_5xx(engine, path, request):
    kind, valid = VALID[path]
    names = next(sorted(body.model_fields) for body in BODIES if body.__name__ == kind)
    app = create_app(engine, ServerConfig(max_request_s=20))

    @settings(
        max_examples=request.config.getoption("--fuzz-examples"),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(changes=st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    def check(changes):
        async def go():
            async with client_of(app) as http:
                return await http.post(path, json={**valid, **changes})

        response = asyncio.run(go())
        assert response.status_code in (200, 400, 404), (changes, response.text)

    check()
    assert engine.is_running
    engine.check()
