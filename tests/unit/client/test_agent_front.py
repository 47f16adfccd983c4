"""The port of a host by which agents from elsewhere reach its workers."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from slipstream.client import agent_front
from slipstream.client.agent_address import VARIABLE, HostAddress
from slipstream.client.agent_exchange import CallExchange
from slipstream.client.agent_front import AgentFront
from slipstream.client.agent_gateway import Gateway
from slipstream.client.environment import Endpoint
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.machine.address import free_port
from slipstream.v1 import environment_pb2 as pb
from support.rigs.waiting import LIMIT_S, until

KEY = b"k" * 32
CHAT = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "It is 7."},
        }
    ],
}
MESSAGE = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "It is 8."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
QUESTION = {"role": "user", "content": "hi"}
NOBODY = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass(frozen=True)
class Scene:
    """A front and the gateways of two workers behind it."""

    front: AgentFront
    gateways: tuple[Gateway, Gateway]
    port: int

    def episode(self, worker: int = 0) -> tuple[CallExchange, Endpoint]:
        exchange = CallExchange(on_waiting=lambda _: None)
        return exchange, self.gateways[worker].open(exchange, by_url=True)

    async def refusal(self, data: bytes) -> bytes:
        """The first line of the answer to bytes of a stranger."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        line = await reader.readline()
        writer.close()
        return line


@asynccontextmanager
async def opened_scene(
    tls: ssl.SSLContext | None = None, path: str = ""
) -> AsyncIterator[Scene]:
    port = free_port("127.0.0.1")
    scheme = "http" if tls is None else "https"
    address = HostAddress(f"{scheme}://127.0.0.1:{port}{path}", KEY)
    front = AgentFront(address, tls)
    gateways = (Gateway(address), Gateway(address))
    async with asyncio.timeout(LIMIT_S), front.serving(f"127.0.0.1:{port}"):
        try:
            yield Scene(front, gateways, port)
        finally:
            for gateway in gateways:
                await gateway.close()


async def answer(exchange: CallExchange, body: object) -> pb.AgentCall:
    """Answers the next call of an episode, and returns it."""
    call = await exchange.next()
    assert call is not None
    part = pb.ReplyPart(call=call.call, status=200, is_last=True)
    part.headers.add(name="content-type", value="application/json")
    part.body = json.dumps(body).encode()
    await exchange.part(part)
    return call


@pytest.mark.parametrize("path", ["", "/tunnel/of/mine"])
async def test_the_clients_of_both_apis_reach_their_own_episodes_of_two_workers(
    path: str,
) -> None:
    async with opened_scene(path=path) as scene:
        first, first_endpoint = scene.episode(worker=0)
        second, second_endpoint = scene.episode(worker=1)
        async with (
            openai.AsyncOpenAI(
                base_url=first_endpoint.base_url, api_key=first_endpoint.api_key
            ) as chat_client,
            anthropic.AsyncAnthropic(
                base_url=second_endpoint.anthropic_url, api_key=second_endpoint.api_key
            ) as message_client,
            asyncio.TaskGroup() as group,
        ):
            answering = group.create_task(answer(first, CHAT))
            group.create_task(answer(second, MESSAGE))
            completion = await chat_client.chat.completions.create(
                model="m", messages=[QUESTION]
            )
            message = await message_client.messages.create(
                model="m", messages=[QUESTION], max_tokens=5
            )
        assert completion.choices[0].message.content == "It is 7."
        assert message.content[0].text == "It is 8."
        assert answering.result().path == "/v1/chat/completions"
        assert scene.front.refusals.num_refused == 0


async def test_one_http_client_calls_episodes_of_several_workers_in_turn() -> None:
    async with opened_scene() as scene, httpx.AsyncClient() as client:
        for worker in (0, 1, 0):
            exchange, endpoint = scene.episode(worker=worker)
            async with asyncio.TaskGroup() as group:
                group.create_task(answer(exchange, CHAT))
                reply = await client.post(
                    f"{endpoint.base_url}/chat/completions",
                    json={"model": "m"},
                    headers={"authorization": f"Bearer {endpoint.api_key}"},
                )
            assert reply.status_code == 200


async def test_parts_of_a_reply_pass_one_by_one_and_a_client_that_leaves_ends_its_call() -> (
    None
):
    async with opened_scene() as scene:
        exchange, endpoint = scene.episode()
        token = endpoint.anthropic_url.rpartition("/")[2]
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        head = (
            f"POST /{token}/v1/messages HTTP/1.1\r\nx-api-key: {endpoint.api_key}\r\n"
        )
        writer.write(f"{head}host: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        call = await exchange.next()
        assert call is not None
        for text in (b"data: 1\n\n", b"data: 2\n\n"):
            await exchange.part(pb.ReplyPart(call=call.call, status=200, body=text))
            await reader.readuntil(text)
        writer.close()
        abandoned = await exchange.next()
        assert abandoned is not None
        assert abandoned.is_abandoned
        assert abandoned.call == call.call


async def test_the_key_of_an_episode_is_asked_for_behind_the_front() -> None:
    async with opened_scene() as scene, httpx.AsyncClient() as client:
        _, endpoint = scene.episode()
        reply = await client.post(f"{endpoint.base_url}/messages", json={})
        assert reply.status_code == 401


async def test_strangers_reach_no_port_of_the_host_and_are_counted() -> None:
    async with opened_scene() as scene:
        _, endpoint = scene.episode()
        token = endpoint.anthropic_url.rpartition("/")[2]
        port, name, mark = token.split("-")
        for path in (
            "v1",
            f"22-{name}-{mark}",
            f"{port}-{name}-{'0' * len(mark)}",
            f"{port}-{name}",
            "",
            "--",
            "\u00e9-\u00e9",
        ):
            data = f"GET /{path}/v1/models HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            assert b" 401 " in await scene.refusal(data)
        assert scene.front.refusals.num_refused == 7


async def test_an_episode_that_is_over_is_refused_though_its_worker_lives() -> None:
    async with opened_scene() as scene, httpx.AsyncClient() as client:
        exchange, endpoint = scene.episode()
        scene.gateways[0].forget(endpoint)
        exchange.end()
        key = {"authorization": f"Bearer {endpoint.api_key}"}
        reply = await client.post(f"{endpoint.base_url}/messages", json={}, headers=key)
        assert reply.status_code == 401


async def test_connections_without_a_path_of_ours_are_few_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_front, "MAX_UNPROVEN", 3)
    async with opened_scene() as scene:
        halves = [
            await asyncio.open_connection("127.0.0.1", scene.port) for _ in range(5)
        ]
        for reader, _ in halves[:2]:
            with contextlib.suppress(ConnectionError):
                assert not await reader.read()
        exchange, endpoint = scene.episode()
        async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
            group.create_task(answer(exchange, CHAT))
            key = {"authorization": f"Bearer {endpoint.api_key}"}
            reply = await client.post(
                f"{endpoint.base_url}/chat/completions", json={}, headers=key
            )
        assert reply.status_code == 200
        for _, writer in halves:
            writer.close()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nhost:", b"\x16\x03\x01"])
async def test_a_head_that_does_not_come_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(agent_front, "HEAD_LIMIT_S", 0.2)
    async with opened_scene() as scene:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(data)
        assert await reader.read() == b""
        writer.close()
        await until(lambda: scene.front.refusals.num_refused == 1)


async def test_a_head_without_an_end_is_refused_at_its_limit() -> None:
    async with opened_scene() as scene:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 40_000)
        await until(lambda: scene.front.refusals.num_refused == 1)
        writer.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key = folder / "key.pem"
    certificate_path = folder / "certificate.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(certificate_path),
            "-subj",
            "/CN=front",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return certificate_path, key


@pytest.mark.process
async def test_calls_come_by_tls_and_a_handshake_that_hangs_is_bounded(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate_path, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate_path, key)
    trust = ssl.create_default_context(cafile=str(certificate_path))
    monkeypatch.setattr(agent_front, "MAX_UNPROVEN", 2)
    async with opened_scene(tls=context) as scene:
        halves = [
            await asyncio.open_connection("127.0.0.1", scene.port) for _ in range(4)
        ]
        for _, writer in halves:
            writer.write(b"\x16\x03\x01")
        exchange, endpoint = scene.episode()
        assert endpoint.base_url.startswith("https://127.0.0.1:")
        async with (
            httpx.AsyncClient(verify=trust) as http_client,
            openai.AsyncOpenAI(
                base_url=endpoint.base_url,
                api_key=endpoint.api_key,
                http_client=http_client,
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(answer(exchange, CHAT))
            completion = await client.chat.completions.create(
                model="m", messages=[QUESTION]
            )
        assert completion.choices[0].message.content == "It is 7."
        assert b"HTTP" not in await scene.refusal(NOBODY)
        for _, writer in halves:
            writer.close()


async def test_servers_of_one_host_share_the_port() -> None:
    port = free_port("127.0.0.1")
    address = HostAddress(f"http://127.0.0.1:{port}", KEY)
    listen = f"127.0.0.1:{port}"
    gateway = Gateway(address)
    exchange = CallExchange(on_waiting=lambda _: None)
    endpoint = gateway.open(exchange, by_url=True)
    key = {"authorization": f"Bearer {endpoint.api_key}"}
    async with (
        asyncio.timeout(LIMIT_S),
        AgentFront(address, None).serving(listen),
        AgentFront(address, None).serving(listen),
        httpx.AsyncClient() as client,
    ):
        # The kernel chooses which of both servers gets a connection.
        for _ in range(12):
            async with asyncio.TaskGroup() as group:
                group.create_task(answer(exchange, CHAT))
                url = f"{endpoint.base_url}/chat/completions"
                reply = await client.post(url, json={}, headers=key)
            assert reply.status_code == 200
    await gateway.close()


async def test_an_address_that_is_taken_is_told() -> None:
    address = HostAddress("http://127.0.0.1:1", KEY)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"agents.listen: nothing can listen at 127.0.0.1:{port}"
        ):
            async with AgentFront(address, None).serving(f"127.0.0.1:{port}"):
                raise AssertionError("it must not serve")


async def test_the_port_of_another_run_is_refused() -> None:
    port = free_port("127.0.0.1")
    listen = f"127.0.0.1:{port}"
    address = HostAddress(f"http://{listen}", KEY)
    other_address = HostAddress(f"http://{listen}", b"o" * 32)
    async with AgentFront(address, None).serving(listen):
        with pytest.raises(
            ConfigError, match=f"port {port} of this host is another run's"
        ):
            async with AgentFront(other_address, None).serving(listen):
                raise AssertionError("it must not serve")
    async with AgentFront(other_address, None).serving(listen):
        pass


def test_a_worker_takes_the_address_out_of_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = HostAddress("https://host:1/x", KEY)
    for name, value in address.variables().items():
        monkeypatch.setenv(name, value)
    assert HostAddress.taken() == address
    assert HostAddress.taken() is None
    assert VARIABLE not in repr(address)
    assert "k" * 32 not in repr(address)


def test_an_agent_from_elsewhere_needs_the_setting() -> None:
    with pytest.raises(EnvironmentFailed, match="set agents.listen"):
        Gateway().open(CallExchange(on_waiting=lambda _: None), by_url=True)
