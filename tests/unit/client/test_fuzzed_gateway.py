"""Requests of any kind to an agent's endpoint get an answer, and only a good one is a call."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.client.agent_exchange import CallExchange
from slipstream.client.agent_gateway import Gateway
from support.rigs.fuzz_budget import BUDGET

NAMES = (
    "authorization",
    "x-api-key",
    "accept",
    "content-type",
    "content-length",
    "cookie",
)
VALUES = st.one_of(
    st.binary(max_size=40), st.just(b"KEY"), st.just(b"Bearer KEY"), st.just(b"9" * 20)
)
HEADERS = st.lists(
    st.tuples(st.sampled_from([name.encode() for name in NAMES]), VALUES), max_size=70
)
PARTS = st.one_of(
    st.sampled_from(
        ["TOKEN", "b", "v1", "", "..", "chat", "x" * 5000, "\ufffd", "a:b"]
    ),
    st.text(max_size=12),
)
PATHS = st.one_of(
    st.lists(PARTS, max_size=6).map(lambda parts: "/" + "/".join(parts)),
    st.lists(PARTS, max_size=3).map(lambda parts: "/TOKEN/v1/" + "/".join(parts)),
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    event_loop = asyncio.new_event_loop()
    yield event_loop
    event_loop.close()


@pytest.fixture(scope="module")
def gateway(loop: asyncio.AbstractEventLoop) -> Iterator[Gateway]:
    async def start() -> Gateway:
        return Gateway()

    gateway = loop.run_until_complete(start())
    yield gateway
    loop.run_until_complete(gateway.close())


async def answered(gateway, scope, body):
    """The status of the answer, and the call that the server would get."""
    exchange = CallExchange(on_waiting=lambda _: None)
    endpoint = gateway.open(exchange)
    token = endpoint.anthropic_url.rpartition("/")[2]
    key = endpoint.api_key.encode()
    scope["path"] = scope["path"].replace("TOKEN", token)
    scope["headers"] = [
        (name, value.replace(b"KEY", key)) for name, value in scope["headers"]
    ]
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        return await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    serving = asyncio.create_task(gateway._serve(scope, receive, send))
    call = asyncio.create_task(exchange.next())
    await asyncio.wait([serving, call], return_when=asyncio.FIRST_COMPLETED)
    got = call.result() if call.done() else None
    exchange.end()
    await asyncio.gather(serving, call)
    return sent[0]["status"], got


@BUDGET.readings
@given(
    path=PATHS,
    method=st.one_of(st.sampled_from(["GET", "POST"]), st.text(max_size=20)),
    query=st.binary(max_size=20),
    headers=HEADERS,
    body=st.lists(st.binary(max_size=30), max_size=3),
)
def test_any_request_is_answered_and_only_a_good_one_is_a_call(
    loop, gateway, path, method, query, headers, body
) -> None:
    scope = {"path": path, "method": method, "query_string": query, "headers": headers}
    status, call = loop.run_until_complete(answered(gateway, scope, body))
    assert status in (400, 401, 404, 413)
    if call is not None:
        # The exchange has ended before the reply, which the client is told.
        assert status == 401
        assert call.path.startswith("/v1/")
        assert call.body == b"".join(body)
        assert {header.name for header in call.headers} <= {"accept", "content-type"}
