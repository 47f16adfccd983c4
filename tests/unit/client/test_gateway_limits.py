"""What strangers, and programs with a key, can make the gateway of agents hold."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import pytest
from slipstream.client import agent_gateway
from slipstream.client.agent_exchange import (
    MAX_OPEN_CALLS,
    MAX_WAITING_BYTES,
    CallExchange,
)
from slipstream.client.agent_gateway import (
    MAX_AHEAD,
    MAX_BODY_BYTES,
    REQUEST_LIMIT_S,
    Gateway,
)
from slipstream.v1 import environment_pb2 as pb
from support.rigs.waiting import LIMIT_S, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Rig:
    """A gateway with one episode, and its raw connections."""

    gateway: Gateway
    exchange: CallExchange
    port: int
    head: bytes
    writers: list[asyncio.StreamWriter]
    # Seconds by which the clock of the event loop is ahead.
    ahead_s: float = 0.0

    async def connected(self, data: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    def begun(self, size: int, **headers: str) -> bytes:
        """The head of a request with a body of `size` bytes."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return self.head + f"content-length: {size}\r\n{lines}\r\n".encode()

    async def pass_limit(self, number: int) -> None:
        """Lets the time of `number` requests run out, once the gateway waits for so many."""
        connections = self.gateway._server.server_state.connections
        await until(
            lambda: (
                sum(connection._deadline is not None for connection in connections)
                == number
            )
        )
        self.ahead_s += REQUEST_LIMIT_S


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Rig]:
    gateway = Gateway()
    exchange = CallExchange(on_waiting=lambda _: None)
    endpoint = gateway.open(exchange)
    url = urlsplit(endpoint.base_url)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\n"
    head += f"authorization: Bearer {endpoint.api_key}\r\n"
    rig = Rig(gateway, exchange, url.port, head.encode(), [])
    # The loop is this test's own.
    loop = asyncio.get_running_loop()
    loop.time = lambda now=loop.time: now() + rig.ahead_s
    try:
        async with asyncio.timeout(LIMIT_S):
            yield rig
    finally:
        for writer in rig.writers:
            writer.close()
        exchange.end()
        await gateway.close()


async def status(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, whose body is read; 0 if the connection is closed."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        return int(head.split()[1])
    return 0


async def flooded(writer: asyncio.StreamWriter, data: bytes, times: int) -> int:
    """Sends `data` again and again; returns the bytes that went out before the end."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for _ in range(times):
            writer.write(data)
            await writer.drain()
            sent += len(data)
    return sent


@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (b"GET /x HTTP/1.1\r\nx-a: ", b"y" * 65536),
        (b"GET /x HTTP/1.1\r\n", b"x-a: " + b"y" * 1000 + b"\r\n"),
        (b"GET /", b"y" * 65536),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"y" * 65536),
    ],
)
async def test_a_head_without_end_is_refused_at_its_limit(
    beginning: bytes, more: bytes
) -> None:
    async with opened() as rig:
        reader, writer = await rig.connected(beginning)
        # Bytes that the kernel takes on its way are not held by the gateway.
        assert await flooded(writer, more, (64 << 20) // len(more)) < 32 << 20
        assert await status(reader) in (0, 400, 401)


async def test_a_body_that_is_read_counts_as_a_call() -> None:
    async with opened() as rig:
        connections_begun = [
            await rig.connected(rig.begun(2) + b"{") for _ in range(MAX_OPEN_CALLS)
        ]
        await until(lambda: rig.exchange.num_reading >= MAX_OPEN_CALLS)
        reader, writer = await rig.connected(rig.begun(2) + b"{}")
        assert await status(reader) == 429
        connections_begun[0][1].close()
        await until(lambda: rig.exchange.num_reading != MAX_OPEN_CALLS)
        writer.write(rig.begun(2) + b"{}")
        assert (await rig.exchange.next()).body == b"{}"


async def test_bodies_of_one_episode_are_counted_before_they_are_whole() -> None:
    async with opened() as rig:
        max_bodies = MAX_WAITING_BYTES // MAX_BODY_BYTES
        connections_held = []
        for _ in range(max_bodies):
            connections_held.append(await rig.connected(rig.begun(MAX_BODY_BYTES)))
            assert await flooded(
                connections_held[-1][1], b"z" * (MAX_BODY_BYTES - 1), 1
            )
        await until(
            lambda: rig.exchange.num_waiting_bytes >= max_bodies * (MAX_BODY_BYTES - 1)
        )
        reader, _ = await rig.connected(rig.begun(100) + b"z" * 100)
        assert await status(reader) == 429
        # A single request is whole: it counts until the server has it.
        connections_held[0][1].write(b"z")
        await until(lambda: rig.exchange.num_reading != max_bodies)
        reader, _ = await rig.connected(rig.begun(100) + b"z" * 100)
        assert await status(reader) == 429
        assert len((await rig.exchange.next()).body) == MAX_BODY_BYTES
        await rig.connected(rig.begun(100) + b"z" * 100)
        assert len((await rig.exchange.next()).body) == 100


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("part", ["nothing", "head", "body", "refused body"])
async def test_a_request_that_does_not_become_whole_is_given_up(
    part: str, kept: bool
) -> None:
    async with opened() as rig:
        reader, writer = await rig.connected()
        if kept:
            # A connection that has had an answer may rest for long.
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await status(reader) == 401
        if part == "nothing" and kept:
            other, _ = await rig.connected()
            await rig.pass_limit(1)
            assert await other.read() == b""
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await status(reader) == 401
            return
        if part == "refused body":
            writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
            assert await status(reader) == 401
        writer.write({"head": b"POST", "body": rig.begun(5) + b"{"}.get(part, b""))
        await rig.pass_limit(1)
        assert await reader.read() == b""
        assert not rig.exchange.num_reading


async def test_a_request_that_came_early_is_given_up_too() -> None:
    async with opened() as rig:
        reader, _ = await rig.connected(
            b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" + rig.begun(2) + b"{"
        )
        assert await status(reader) == 401
        await rig.pass_limit(1)
        assert await reader.read() == b""
        assert not rig.exchange.num_reading


@pytest.mark.parametrize("is_refused", [False, True])
async def test_the_connection_that_rests_longest_makes_room_for_a_new_one(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(agent_gateway.bounded_server, max_connections=4)
    monkeypatch.setattr(agent_gateway, "bounded_server", few)
    async with opened() as rig:
        working = await rig.connected(rig.begun(2) + b"{}")
        call = await rig.exchange.next()
        resting = []
        for number in range(6):
            head = b"GET /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
            resting.append(await rig.connected(head if is_refused else b"G"))
            if is_refused:
                assert await status(resting[-1][0]) == 401
            elif number >= 3:
                assert await status(resting[number - 3][0]) == 0
        if is_refused:
            assert [await status(reader) for reader, _ in resting[:3]] == [0] * 3
        part = pb.ReplyPart(call=call.call, status=204, is_last=True)
        await rig.exchange.part(part)
        assert await status(working[0]) == 204
        for _, writer in resting[3:]:
            writer.write(
                b"ET /x HTTP/1.1\r\nhost: x\r\n\r\n" if not is_refused else b"z" * 9
            )
            if is_refused:
                writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [await status(reader) for reader, _ in resting[3:]] == [401] * 3


async def test_requests_ahead_of_their_answers_have_a_number() -> None:
    async with opened() as rig:
        ahead = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_AHEAD + 1)
        reader, _ = await rig.connected(rig.begun(2) + b"{}" + ahead)
        assert await status(reader) in (0, 400)
