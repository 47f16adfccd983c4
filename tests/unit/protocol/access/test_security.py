import asyncio
import contextlib
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import QueueSection, SecuritySection
from slipstream.protocol.access.security import (
    CHANNEL_OPTIONS,
    MAX_REQUEST_BYTES,
    MAX_STREAMS,
    Credentials,
    bind,
    call_metadata,
    check_address,
    create_server,
    is_loopback,
    open_blocking_channel,
    open_channel,
    without_password,
)
from slipstream.protocol.bounds import max_message_bytes
from support.fakes.small_configs import config_of
from support.rigs.fuzz_calls import METHODS
from support.rigs.fuzzing import new
from support.rigs.waiting import LIMIT_S

TOKEN = "s" * 32
OPEN = Credentials()
WITH_TOKEN = Credentials(token=TOKEN)
SHAPES = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")


def echo_handlers() -> grpc.GenericRpcHandler:
    """One method of each of gRPC's four shapes; each answers with what it was sent."""

    async def unary_unary(request: bytes, context: object) -> bytes:
        return request

    async def unary_stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield request

    async def stream_unary(requests: AsyncIterator[bytes], context: object) -> bytes:
        return b"".join([request async for request in requests])

    async def stream_stream(requests, context):
        async for request in requests:
            yield request

    return grpc.method_handlers_generic_handler(
        "test.Echo",
        {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
            "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
        },
    )


@contextlib.asynccontextmanager
async def serving_at(
    host: str, credentials: Credentials, *before: grpc.GenericRpcHandler
) -> AsyncIterator[str]:
    """The address of a server that echoes."""
    server = create_server(credentials)
    server.add_generic_rpc_handlers((*before, echo_handlers()))
    address = f"{host}:{bind(server, f'{host}:0', credentials)}"
    await server.start()
    yield address
    await server.stop(None)


async def call(
    channel: grpc.aio.Channel, shape: str, credentials: Credentials
) -> bytes:
    async def requests() -> AsyncIterator[bytes]:
        yield b"hello"

    kind = {
        "UnaryUnary": channel.unary_unary,
        "UnaryStream": channel.unary_stream,
        "StreamUnary": channel.stream_unary,
        "StreamStream": channel.stream_stream,
    }[shape]
    request = b"hello" if shape.startswith("Unary") else requests()
    answer = kind(f"/test.Echo/{shape}")(
        request, metadata=call_metadata(credentials), timeout=LIMIT_S
    )
    if shape.endswith("Unary"):
        return await answer
    return b"".join([part async for part in answer])


class Names(asyncio.DatagramProtocol):
    """A name server on loopback, which answers every name with the address `here`."""

    def __init__(self, here: str) -> None:
        self.here = here

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, caller: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5
        is_asked = data[end - 4 : end - 2] == b"\0\x01"
        head = (
            data[:2]
            + b"\x81\x80\0\x01"
            + (b"\0\x01" if is_asked else b"\0\0")
            + bytes(4)
        )
        record = (
            b"\xc0\x0c\0\x01\0\x01" + bytes(4) + b"\0\x04" + socket.inet_aton(self.here)
        )
        self.transport.sendto(head + data[12:end] + record * is_asked, caller)


async def test_a_controller_is_found_at_the_address_to_which_its_name_moves() -> None:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(
        lambda: Names("127.0.0.1"), local_addr=("127.0.0.1", 0)
    )
    name_server = transport.get_extra_info("sockname")[1]
    async with serving_at("127.0.0.1", OPEN) as first:
        port = first.rpartition(":")[2]
        target = f"dns://127.0.0.1:{name_server}/controller.example:{port}"
        channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        assert await call(channel, "UnaryUnary", OPEN) == b"hello"
    moved = create_server(OPEN)
    moved.add_generic_rpc_handlers((echo_handlers(),))
    bind(moved, f"127.0.0.2:{port}", OPEN)
    await moved.start()
    names.here = "127.0.0.2"
    # A rank of the trainer gives up after 30 s.
    answer = channel.unary_unary("/test.Echo/UnaryUnary")
    assert await answer(b"hello", timeout=25.0, wait_for_ready=True) == b"hello"
    await channel.close()
    await moved.stop(None)
    transport.close()


def make_certificate(folder: Path, names: str, *, days: int = 2) -> Path:
    """A self-signed certificate for these names; its key lies beside it as key.pem."""
    folder.mkdir(exist_ok=True)
    (folder / "extensions").write_text(f"subjectAltName={names}\n")
    request = (
        "openssl",
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    )
    sign = ("openssl", "x509", "-req", "-in", "request.pem", "-signkey", "key.pem")
    for command in (
        (
            *request,
            "-subj",
            "/CN=localhost",
            "-keyout",
            "key.pem",
            "-out",
            "request.pem",
        ),
        (
            *sign,
            "-days",
            str(days),
            "-extfile",
            "extensions",
            "-out",
            "certificate.pem",
        ),
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    certificate = make_certificate(tmp_path, "DNS:localhost,IP:127.0.0.1")
    return certificate, certificate.with_name("key.pem")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7070", "localhost:1", "[::1]:7070", "unix:/tmp/x.sock", "127.8.9.1:1"],
)
def test_loopback_needs_neither_tls_nor_a_token(address: str) -> None:
    assert is_loopback(address)
    check_address(address, OPEN, what="the address")


@pytest.mark.parametrize("address", ["10.0.0.1:7070", "example.org:7070", "[::]:7070"])
def test_any_other_address_needs_tls_and_a_token(address: str) -> None:
    assert not is_loopback(address)
    half = Credentials(certificate=b"c", key=b"k")
    for credentials, message in (
        (OPEN, "is not loopback: set security.tls_certificate and tls_key, or tls_ca"),
        (
            WITH_TOKEN,
            "is not loopback: set security.tls_certificate and tls_key, or tls_ca",
        ),
        (half, "is not loopback: set security.token_file"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_address(address, credentials, what="controller.address")
        assert str(caught.value) == f"controller.address {address} {message}"
    complete_credentials = Credentials(certificate=b"c", key=b"k", token=TOKEN)
    check_address(address, complete_credentials, what="controller.address")


@pytest.mark.parametrize("open_it", [open_channel, open_blocking_channel])
def test_a_channel_to_another_host_is_refused_without_tls(open_it):
    with pytest.raises(ConfigError, match="10.0.0.1:7070 is not loopback"):
        open_it("10.0.0.1:7070", WITH_TOKEN)


async def test_a_server_on_another_address_is_refused_without_tls() -> None:
    server = create_server(OPEN)
    with pytest.raises(ConfigError, match="10.0.0.1:0 is not loopback"):
        bind(server, "10.0.0.1:0", OPEN)


async def test_a_port_in_use_is_reported() -> None:
    first = create_server(OPEN)
    second = create_server(OPEN)
    port = bind(first, "127.0.0.1:0", OPEN)
    await first.start()
    with pytest.raises(
        ConfigError, match=f"cannot listen on 127.0.0.1:{port}: is the port in use"
    ):
        bind(second, f"127.0.0.1:{port}", OPEN)
    await first.stop(None)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_call_without_the_right_token_is_refused(shape: str) -> None:
    async with (
        serving_at("127.0.0.1", WITH_TOKEN) as address,
        open_channel(address, OPEN) as channel,
    ):
        assert await call(channel, shape, WITH_TOKEN) == b"hello"
        for token in (None, "", "w" * 32, TOKEN[:-1], TOKEN + "s", "Bearer " + TOKEN):
            wrong = Credentials(token=token)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, shape, wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_stranger_is_refused_before_a_request_is_read(shape: str) -> None:
    async def requests() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with (
        serving_at("127.0.0.1", WITH_TOKEN) as address,
        open_channel(address, OPEN) as channel,
    ):
        # On the wire, a unary call whose request never comes.
        refused = channel.stream_stream(f"/test.Echo/{shape}")(
            requests(), timeout=LIMIT_S
        )
        assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("token", [TOKEN, None])
async def test_a_compressed_request_is_refused(token: str | None) -> None:
    credentials = Credentials(token=token)
    async with (
        serving_at("127.0.0.1", credentials) as address,
        grpc.aio.insecure_channel(
            address, compression=grpc.Compression.Gzip
        ) as channel,
    ):
        for shape in SHAPES:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel, shape, credentials)


async def test_a_connection_has_a_number_of_calls() -> None:
    async with serving_at("127.0.0.1", OPEN) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        # The preface of HTTP/2 and empty settings; the server's settings come first.
        writer.write(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        )
        head = await reader.readexactly(9)
        content = await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.close()
    assert head[3] == 4
    settings = dict(struct.iter_unpack(">HI", content))
    assert settings[0x3] == MAX_STREAMS


async def test_no_request_is_larger_than_those_of_the_methods() -> None:
    sizes = [
        max_message_bytes(type(new(method.input_type))) for method in METHODS.values()
    ]
    assert max(sizes) <= MAX_REQUEST_BYTES < 1.1 * max(sizes)
    async with (
        serving_at("127.0.0.1", OPEN) as address,
        open_channel(address, OPEN) as channel,
    ):
        ask = channel.unary_unary("/test.Echo/UnaryUnary")
        assert (
            len(await ask(bytes(MAX_REQUEST_BYTES), timeout=LIMIT_S))
            == MAX_REQUEST_BYTES
        )
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await ask(bytes(MAX_REQUEST_BYTES + 1), timeout=LIMIT_S)


async def test_an_unknown_method_is_unimplemented_rather_than_an_error_of_the_server() -> (
    None
):
    server = create_server(WITH_TOKEN)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', WITH_TOKEN)}"
    await server.start()
    async with open_channel(address, OPEN) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "UnaryUnary", WITH_TOKEN)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


@pytest.mark.process
async def test_calls_go_through_tls_with_a_certificate_of_ones_own(
    certificate, tmp_path
):
    (tmp_path / "token").write_text(TOKEN + "\n")
    serving = Credentials.load(
        SecuritySection(
            tls_certificate=certificate[0],
            tls_key=certificate[1],
            token_file=tmp_path / "token",
        )
    )
    calling = Credentials.load(
        SecuritySection(tls_ca=certificate[0], token_file=tmp_path / "token")
    )
    async with serving_at("localhost", serving) as address:
        for shape in SHAPES:
            async with open_channel(address, calling) as channel:
                assert await call(channel, shape, calling) == b"hello"
        with open_blocking_channel(address, calling) as blocking:
            grpc.channel_ready_future(blocking).result(timeout=LIMIT_S)
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(plain, "UnaryUnary", calling)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.process
@pytest.mark.parametrize("fault", ["another name", "expired", "another authority"])
async def test_a_caller_refuses_a_server_that_cannot_show_who_it_is(fault, tmp_path):
    names = "DNS:elsewhere.example" if fault == "another name" else "DNS:localhost"
    days = -1 if fault == "expired" else 2
    shown = certificate = make_certificate(tmp_path / "server", names, days=days)
    if fault == "another authority":
        certificate = make_certificate(tmp_path / "other", names)
    (tmp_path / "token").write_text(TOKEN)
    token = {"token_file": tmp_path / "token"}
    serving = Credentials.load(
        SecuritySection(
            tls_certificate=shown, tls_key=shown.with_name("key.pem"), **token
        )
    )
    calling = Credentials.load(SecuritySection(tls_ca=certificate, **token))
    seen: list[str] = []
    async with serving_at("localhost", serving, Listener(seen)) as address:
        async with open_channel(address, calling) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "UnaryUnary", calling)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert TOKEN not in str(caught.value)
        # The token never left.
        assert seen == []


@pytest.mark.process
async def test_a_controller_may_ask_callers_for_a_certificate(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "server", "DNS:localhost")
    theirs = make_certificate(tmp_path / "host", "DNS:host")
    strange = make_certificate(tmp_path / "stranger", "DNS:host")
    serving = Credentials.load(
        SecuritySection(
            tls_certificate=certificate,
            tls_key=certificate.with_name("key.pem"),
            tls_client_ca=theirs,
        )
    )
    async with serving_at("localhost", serving) as address:
        for shown in (theirs, strange, None):
            key = shown and shown.with_name("key.pem")
            section = SecuritySection(
                tls_ca=certificate, tls_certificate=shown, tls_key=key
            )
            calling = Credentials.load(section)
            async with open_channel(address, calling) as channel:
                if shown is theirs:
                    assert await call(channel, "UnaryUnary", calling) == b"hello"
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, "UnaryUnary", calling)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class Listener(grpc.GenericRpcHandler):
    """Notes what reaches a server."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        self._seen.append(handler_call_details.method)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p:w@127.0.0.1:6379/0", "redis://:***@127.0.0.1:6379/0"),
        ("rediss://user:secret@queue/0?db=1", "rediss://user:***@queue/0?db=1"),
        (
            "unix:///run/v.sock?password=secret&db=1",
            "unix:///run/v.sock?password=***&db=1",
        ),
        (
            "unix://user@/run/v.sock?db=1&password=secret",
            "unix://user@/run/v.sock?db=1&password=***",
        ),
        ("rediss://queue.example:6380/0", "rediss://queue.example:6380/0"),
    ],
)
def test_settings_are_shown_without_the_password_of_the_queue(url, shown, tmp_path):
    config = config_of(tmp_path)
    config = config.model_copy(
        update={"queue": QueueSection(kind="redis", redis_url=url)}
    )
    assert without_password(config).queue.redis_url == shown
    assert without_password(config).run == config.run
