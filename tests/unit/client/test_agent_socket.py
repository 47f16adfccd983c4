"""An episode's unix socket: its own calls alone, bounded, and gone with the episode."""

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from slipstream.client.agent_exchange import MAX_OPEN_CALLS, CallExchange
from slipstream.client.agent_gateway import (
    MAX_BODY_BYTES,
    MAX_SOCKET_CONNECTIONS,
    REQUEST_LIMIT_S,
    Gateway,
)
from slipstream.client.environment import Endpoint
from slipstream.core.machine.files import remove_abandoned
from slipstream.v1 import environment_pb2 as pb
from support.rigs.waiting import LIMIT_S, until

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
OWNER = """
import asyncio
from slipstream.client.agent_exchange import CallExchange
from slipstream.client.agent_gateway import Gateway

async def main():
    endpoint = Gateway().open(CallExchange(on_waiting=lambda _: None), by_socket=True)
    print(endpoint.socket_path, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass
class Scene:
    """A gateway, and the raw connections to its sockets."""

    gateway: Gateway = field(default_factory=Gateway)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def episode(self) -> tuple[CallExchange, Endpoint]:
        exchange = CallExchange(on_waiting=lambda _: None)
        return exchange, self.gateway.open(exchange, by_socket=True)

    async def connected(
        self, endpoint: Endpoint, data: bytes = b""
    ) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(endpoint.socket_path)
        self.writers.append(writer)
        writer.write(data)
        return reader


@contextlib.asynccontextmanager
async def opened_scene() -> AsyncIterator[Scene]:
    scene = Scene()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield scene
    finally:
        for writer in scene.writers:
            writer.close()
        await scene.gateway.close()


async def status(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, whose body is read; 0 if the connection is closed."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        return int(head.split()[1])
    return 0


def request(path: str, body: bytes = b"{}", **headers: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{lines}\r\n"
    )
    return head.encode() + body


def listening_ports() -> set[str]:
    """The inodes of this process's TCP sockets that listen."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    inodes = {line.split()[9] for line in lines if line.split()[3] == "0A"}
    descriptors = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {inode for inode in inodes if f"socket:[{inode}]" in descriptors}


async def test_an_episode_with_a_socket_opens_no_port() -> None:
    before = listening_ports()
    async with opened_scene() as scene:
        scene.episode()
        assert listening_ports() == before
        scene.gateway.open(CallExchange(on_waiting=lambda _: None))
        assert len(listening_ports() - before) == 1


async def test_the_socket_lies_in_a_folder_that_only_this_user_may_enter() -> None:
    async with opened_scene() as scene:
        path = Path(scene.episode()[1].socket_path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert len(os.fsencode(path)) < 100


@pytest.mark.parametrize(
    ("path", "branch"),
    [
        ("/v1/messages", ""),
        ("/b/judge/v1/responses", "judge"),
        ("/v1/chat/completions?a=1", ""),
    ],
)
async def test_a_call_through_the_socket_is_one_of_its_own_episode(
    path: str, branch: str
) -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        other_exchange, _ = scene.episode()
        await scene.connected(endpoint, request(path, authorization="Bearer any"))
        call = await exchange.next()
        assert call is not None
        assert call.path == path.removeprefix("/b/judge")
        assert call.branch == branch
        assert other_exchange.num_waiting_bytes == 0


async def test_the_key_of_a_header_reaches_no_server() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        data = request(
            "/v1/messages", authorization="Bearer s", cookie="s", forwarded="for=s"
        )
        await scene.connected(endpoint, data)
        call = await exchange.next()
        assert call is not None
        assert not call.headers


async def test_parts_of_a_reply_arrive_one_by_one() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        reader = await scene.connected(endpoint, request("/v1/chat/completions"))
        call = await exchange.next()
        assert call is not None
        await exchange.part(
            pb.ReplyPart(call=call.call, status=200, body=b"data: 1\n\n")
        )
        assert (await reader.readuntil(b"data: 1\n\n")).startswith(b"HTTP/1.1 200")
        await exchange.part(
            pb.ReplyPart(call=call.call, body=b"data: 2\n\n", is_last=True)
        )
        await reader.readuntil(b"data: 2\n\n")


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/token/v1/chat/completions", "/b/a b/v1/x", "/../v1/x", "//v1/x"],
)
async def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    async with opened_scene() as scene:
        _, endpoint = scene.episode()
        reader = await scene.connected(endpoint, request(path.replace(" ", "%20")))
        assert await status(reader) == 404


async def test_the_end_of_an_episode_removes_the_socket_and_ends_its_connections() -> (
    None
):
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        _, other = scene.episode()
        data = {
            "idle": b"",
            "head": b"POST",
            "body": CHAT + b"content-length: 9\r\n\r\n{",
        }
        streams = {
            name: await scene.connected(endpoint, beginning)
            for name, beginning in data.items()
        }
        streams["call"] = await scene.connected(
            endpoint, request("/v1/chat/completions")
        )
        await exchange.next()
        await until(lambda: exchange.num_reading == 1)
        scene.gateway.forget(endpoint)
        exchange.end()
        for reader in streams.values():
            assert await status(reader) == 0
        assert not Path(endpoint.socket_path).parent.exists()
        assert Path(other.socket_path).exists()
        with pytest.raises(FileNotFoundError):
            await scene.connected(endpoint)


async def test_an_episode_that_ends_at_once_leaves_nothing() -> None:
    async with opened_scene() as scene:
        _, endpoint = scene.episode()
        scene.gateway.forget(endpoint)
        scene.gateway.forget(endpoint)
        assert not Path(endpoint.socket_path).parent.exists()


async def test_a_flood_of_connections_is_bounded_and_leaves_other_episodes_alone() -> (
    None
):
    async with opened_scene() as scene:
        _, flooded = scene.episode()
        _, other = scene.episode()
        quiet = await scene.connected(other)
        quiet_writer = scene.writers[-1]
        streams = [
            await scene.connected(flooded, b"G")
            for _ in range(2 * MAX_SOCKET_CONNECTIONS)
        ]
        for reader in streams[:MAX_SOCKET_CONNECTIONS]:
            assert await status(reader) == 0
        quiet_writer.write(request("/none"))
        assert await status(quiet) == 404


async def test_bodies_without_end_are_given_up_after_the_time_of_a_request() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        ahead_s = 0.0
        loop = asyncio.get_running_loop()
        loop.time = lambda now=loop.time: now() + ahead_s  # type: ignore[method-assign]
        beginning = CHAT + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
        streams = [
            await scene.connected(endpoint, beginning) for _ in range(MAX_OPEN_CALLS)
        ]
        await until(lambda: exchange.num_reading == MAX_OPEN_CALLS)
        reader = await scene.connected(endpoint, request("/v1/messages"))
        assert await status(reader) == 429
        ahead_s = REQUEST_LIMIT_S
        for slow_reader in streams:
            assert await status(slow_reader) == 0
        await until(lambda: exchange.num_reading == 0)


async def test_a_body_beyond_its_limit_is_refused_before_it_is_read() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        head = CHAT + f"content-length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
        reader = await scene.connected(endpoint, head)
        assert await status(reader) == 413
        assert exchange.num_waiting_bytes == 0


async def test_a_request_behind_a_smuggled_one_is_no_call_of_its_own() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        both = (
            CHAT + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        reader = await scene.connected(endpoint, both + request("/v1/messages"))
        assert await status(reader) in (0, 400)
        assert exchange.num_waiting_bytes == 0


@pytest.mark.process
def test_what_a_killed_process_left_is_removed_by_the_next_start() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().decode().strip())
        remove_abandoned()
        assert path.is_socket()
        owner.send_signal(signal.SIGKILL)
        owner.wait(LIMIT_S)
    assert path.is_socket()
    remove_abandoned()
    assert not path.parent.exists()


async def test_a_client_of_http_over_a_socket_is_served() -> None:
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()

        def ask() -> bytes:
            client = http.client.HTTPConnection("model")
            client.sock = socket.socket(socket.AF_UNIX)
            client.sock.connect(endpoint.socket_path)
            client.request("POST", "/v1/messages", b"{}")
            with contextlib.closing(client):
                return client.getresponse().read()

        asking = asyncio.create_task(asyncio.to_thread(ask))
        call = await exchange.next()
        assert call is not None
        await exchange.part(
            pb.ReplyPart(call=call.call, status=200, body=b"yes", is_last=True)
        )
        assert await asking == b"yes"
