"""A Redis that lost data is noticed, whatever lost them: during a run and at its next start."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from slipstream.core.errors import QueueError
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.embedded import USERS, EmbeddedServer
from slipstream.protocol.queue.redis import RedisReceiver, RedisSender
from slipstream.protocol.queue.redis_connection import DEFAULT_USER, ROLES
from support.rigs.waiting import until

pytestmark = pytest.mark.process

LIMIT_S = 20.0
STREAM, MARK = "slipstream:run:trajectories", "slipstream:run:mark"
WHAT_TO_DO = "start the run again: it generates lost trajectories again"
REDIS_SERVER = shutil.which("redis-server")
needs_redis_server = pytest.mark.skipif(
    REDIS_SERVER is None, reason="redis-server of Debian's package is not installed"
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    users = USERS | {"administrator": "~* &* +@all"}
    async with EmbeddedServer(tmp_path / "valkey", users) as server:
        yield server


@pytest.fixture
async def administrator(server: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url("administrator")) as client:
        yield client


def name(number: int) -> TrajectoryId:
    return TrajectoryId(f"group.{number}")


async def kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()


async def counter(client: redis.asyncio.Redis, which: str) -> str:
    return f"{MARK}:{(await client.get(MARK)).decode()}:{which}"


async def delete_stream(client: redis.asyncio.Redis) -> None:
    await client.delete(STREAM)


async def lose_an_unread_entry(client: redis.asyncio.Redis) -> None:
    await client.incrby(await counter(client, "added"), 100)


async def trim_stream(client: redis.asyncio.Redis) -> None:
    await client.xtrim(STREAM, maxlen=1, approximate=False)


async def delete_group(client: redis.asyncio.Redis) -> None:
    await client.xgroup_destroy(STREAM, "controller")


async def delete_added(client: redis.asyncio.Redis) -> None:
    await client.delete(await counter(client, "added"))


async def delete_removed(client: redis.asyncio.Redis) -> None:
    await client.delete(await counter(client, "removed"))


async def spoil_added(client: redis.asyncio.Redis) -> None:
    await client.set(await counter(client, "added"), "many")


async def delete_mark(client: redis.asyncio.Redis) -> None:
    await client.delete(MARK)


async def flush(client: redis.asyncio.Redis) -> None:
    await client.flushall()


def message_of(error: BaseException) -> str:
    """The one message of an error, or of a group with the same one again and again."""
    if isinstance(error, BaseExceptionGroup):
        (message,) = {message_of(each) for each in error.exceptions}
        return message
    assert isinstance(error, QueueError)
    return str(error)


@pytest.mark.parametrize(
    ("lose", "shows"),
    [
        (delete_stream, "the stream or its group is gone"),
        (delete_group, "the stream or its group is gone"),
        (lose_an_unread_entry, "it counts 400 bytes that wait, and has 300"),
        (delete_added, "it counts -100 bytes that wait"),
        (delete_removed, "it counts 0 bytes removed, and counted 100 before"),
        (spoil_added, "a counter holds b'many', which is no number of bytes"),
        (delete_mark, "it came back empty"),
        (flush, "it came back empty"),
    ],
)
async def test_a_receiver_notices_what_is_lost_beside_it(server, administrator, lose, shows):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as receiver:
            async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
                for number in range(4):
                    await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
                received = [await receiver.get() for _ in range(4)]
            await receiver.acknowledge([received[0].trajectory_id])
            while await administrator.xlen(STREAM) != 3:
                await asyncio.sleep(0.005)
            await lose(administrator)
            await asyncio.Event().wait()
    message = message_of(caught.value)
    assert message.startswith(f"redis at {server.address} lost data of run run: {shows}")
    assert message.endswith(WHAT_TO_DO)
    assert "\n" not in message


async def test_a_receiver_notices_that_somebody_else_deletes_what_it_has_read(
    server: EmbeddedServer, administrator: redis.asyncio.Redis
) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as receiver:
            async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
                for number in range(3):
                    await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            received = [(await receiver.get()).trajectory_id for _ in range(3)]
            await trim_stream(administrator)
            await receiver.acknowledge(received)
            await asyncio.Event().wait()
    assert "run run: 2 entries were deleted by another client; " in message_of(caught.value)


@pytest.mark.parametrize("lose", [delete_stream, delete_added, spoil_added, delete_mark, flush])
async def test_a_sender_notices_a_loss_and_never_counts_below_zero(server, administrator, lose):
    async with (
        RedisReceiver(server.url(), "run") as receiver,
        RedisSender(server.url("rollout"), "run", 10_000) as before,
    ):
        await before.put(name(0), b"x" * 100, timeout_s=LIMIT_S)
        await receiver.acknowledge([(await receiver.get()).trajectory_id])
        while await administrator.xlen(STREAM):
            await asyncio.sleep(0.005)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            try:
                await lose(administrator)
                await sender.put(name(1), b"x" * 50, timeout_s=LIMIT_S)
            finally:
                assert sender.queued_bytes >= 0
    assert "lost data of run run: " in message_of(caught.value)


@asynccontextmanager
async def older_files(server: EmbeddedServer, folder: Path) -> AsyncIterator[None]:
    """Takes the server back, at the end, to what it had at the beginning."""
    await kill(server)
    shutil.copytree(folder, folder.with_name("older"))
    await server.start()
    yield
    await kill(server)
    shutil.rmtree(folder)
    folder.with_name("older").rename(folder)
    await server.start()


async def test_older_files_are_noticed_by_both_ends(server: EmbeddedServer, tmp_path: Path) -> None:
    folder = tmp_path / "valkey" / "appendonlydir"
    ended = {}
    ready, taken_back = asyncio.Event(), asyncio.Event()

    async def receive() -> None:
        async with RedisReceiver(server.url(), "run") as receiver:
            ready.set()
            while True:
                # What it holds and does not give up it has not lost.
                await receiver.acknowledge([(await receiver.get()).trajectory_id])

    async def send() -> None:
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            await sender.put(name(0), b"x" * 100, timeout_s=LIMIT_S)
            async with older_files(server, folder):
                await sender.put(name(1), b"x" * 100, timeout_s=LIMIT_S)
            taken_back.set()
            await asyncio.Event().wait()

    async def note(end: str, running: Awaitable[None]) -> None:
        try:
            await running
        except* QueueError as error:
            ended[end] = message_of(error)

    async with asyncio.timeout(2 * LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(note("receiver", receive()))
        await ready.wait()
        group.create_task(note("sender", send()))
    assert taken_back.is_set()
    assert set(ended) == {"receiver", "sender"}
    # The end that notices first depends on what each had read.
    assert all("lost data of run run: " in line for line in ended.values())


@pytest.mark.parametrize("lose", [trim_stream, delete_added, spoil_added])
async def test_the_next_receiver_delivers_what_is_left_under_a_new_mark(
    server: EmbeddedServer,
    administrator: redis.asyncio.Redis,
    lose: Callable[[redis.asyncio.Redis], Awaitable[None]],
) -> None:
    async with RedisReceiver(server.url(), "run") as first:
        mark = first.mark
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            for number in range(3):
                await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            for _ in range(3):
                await first.get()
    await lose(administrator)
    left = await administrator.xlen(STREAM)
    async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as second:
        assert second.mark != mark
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            assert sender.queued_bytes == 100 * left
            await sender.put(name(9), b"x" * 100, timeout_s=LIMIT_S)
            names = [(await second.get()).trajectory_id for _ in range(left + 1)]
            assert names == [*(name(number) for number in range(3))][3 - left :] + [name(9)]
            await second.acknowledge(names)
            await until(lambda: not sender.queued_bytes)
    async with RedisReceiver(server.url(), "run") as third:
        assert third.mark == second.mark


async def test_a_sender_delivers_what_it_holds_to_a_controller_that_begins_anew(
    server: EmbeddedServer, administrator: redis.asyncio.Redis
) -> None:
    async with RedisReceiver(server.url(), "run"):
        pass
    async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
        await sender.put(name(0), b"x" * 900, timeout_s=LIMIT_S)
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(sender.put(name(1), b"x" * 900, timeout_s=LIMIT_S))
            await asyncio.sleep(0)
            assert not waits.done()
            async with administrator.pipeline(transaction=True) as pipeline:
                # A controller that begins after a flush does this in one moment.
                pipeline.flushall()
                pipeline.set(MARK, "1234567890abcdef-0")
                pipeline.xgroup_create(STREAM, "controller", id="0", mkstream=True)
                await pipeline.execute()
        async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as receiver:
            assert receiver.mark == "1234567890abcdef-0"
            assert (await receiver.get()).trajectory_id == name(1)


async def test_a_mark_of_an_earlier_version_is_taken(server, administrator):
    await administrator.set(MARK, "1234567890abcdef")
    await administrator.set(f"{MARK}:1234567890abcdef:added", "7")
    await administrator.xadd(STREAM, {"id": "group.1", "data": "x" * 7})
    async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as receiver:
        assert receiver.mark == "1234567890abcdef"
        assert (await receiver.get()).trajectory_id == name(1)


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[Callable[[str], str]]:
    """Debian's Redis with the documented rights; its address for a user."""
    socket = folder / "r.sock"
    users = [f"user {role.user} on >secret {role.rules}" for role in ROLES.values()]
    lines = [DEFAULT_USER, *users]
    (folder / "users.acl").write_text("".join(f"{line}\n" for line in lines))
    command = [REDIS_SERVER, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    command += ["--aclfile", str(folder / "users.acl"), "--save", "", "--appendonly", "yes"]
    command += ["--appendfsync", "always"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)

    def url(user: str) -> str:
        return f"unix://{user}:secret@{socket}"

    try:
        async with asyncio.timeout(LIMIT_S):
            while not await answers(url("controller")):
                await asyncio.sleep(0.01)
        yield url
    finally:
        process.kill()
        await process.wait()


async def answers(url: str) -> bool:
    async with redis.asyncio.Redis.from_url(url, protocol=2) as client:
        try:
            return bool(await client.ping())
        except RedisConnectionError:
            return False


@needs_redis_server
async def test_debians_redis_keeps_everything_with_the_documented_rights(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as url:
        async with (
            RedisReceiver(url("controller"), "run") as first,
            RedisSender(url("rollout"), "run", 10_000) as sender,
        ):
            for number in range(10):
                await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            await first.acknowledge([(await first.get()).trajectory_id])
        mark = first.mark
    # Killed by the end of the block.
    async with (
        redis_server(tmp_path) as url,
        asyncio.timeout(LIMIT_S),
        RedisReceiver(url("controller"), "run") as second,
    ):
        assert second.mark == mark
        assert [(await second.get()).trajectory_id for _ in range(9)] == [
            name(number) for number in range(1, 10)
        ]


async def test_older_files_are_noticed_although_others_have_added_more_since(server, tmp_path):
    folder = tmp_path / "valkey" / "appendonlydir"
    second = tmp_path / "second"
    async with RedisReceiver(server.url(), "run") as receiver:
        mark = receiver.mark
    with pytest.raises(BaseExceptionGroup) as caught:
        async with (
            asyncio.timeout(2 * LIMIT_S),
            RedisSender(server.url("rollout"), "run", 10_000) as sender,
        ):
            await sender.put(name(0), b"x" * 100, timeout_s=LIMIT_S)
            await kill(server)
            shutil.copytree(folder, second / "appendonlydir")
            await server.start()
            await sender.put(name(1), b"x" * 100, timeout_s=LIMIT_S)
            await kill(server)
            # Others are faster than the sender, which looks for the server all the time.
            async with (
                EmbeddedServer(second, USERS) as older,
                RedisSender(older.url("rollout"), "run", 10_000) as other,
            ):
                for number in range(2, 6):
                    await other.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            shutil.rmtree(folder)
            shutil.copytree(second / "appendonlydir", folder)
            await server.start()
            await asyncio.Event().wait()
    assert "lost data of run run: it counts 100 bytes added by this server, and " in message_of(
        caught.value
    )
    # The receiver has counted what it missed, so that the controller begins anew.
    async with asyncio.timeout(LIMIT_S), RedisReceiver(server.url(), "run") as receiver:
        assert receiver.mark != mark
