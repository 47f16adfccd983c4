"""A Redis that lost data is noticed, whatever lost them: during a run and at its next start."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from slipstream.core.errors import ConfigError
from slipstream.extensions.redis.connection import DELIVERY
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import CONSUMER, GROUP, RedisReceiver
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import trajectory_pb2
from support.fakes.queue_seals import without_seal
from support.rigs import tools
from support.rigs.valkey import (
    BYTES,
    DEFAULT_USER,
    STREAM,
    USERS,
    EmbeddedServer,
    causes,
    kill,
    name,
)
from support.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.process

WHAT_TO_DO = "start the run again: it generates lost trajectories again"
REDIS_SERVER = tools.program("redis-server")
needs_redis_server = pytest.mark.skipif(
    REDIS_SERVER is None, reason=f"no redis-server here: {tools.HOW}"
)


async def delete_stream(client: redis.asyncio.Redis) -> None:
    await client.delete(STREAM)


async def lose_an_unread_entry(client: redis.asyncio.Redis) -> None:
    """In one moment, so that the receiver cannot have read it."""
    async with client.pipeline(transaction=True) as pipeline:
        pipeline.xadd(STREAM, {"delivery": "unread"})
        pipeline.execute_command("XTRIM", STREAM, "MAXLEN", 0)
        await pipeline.execute()


async def trim_stream(client: redis.asyncio.Redis) -> None:
    await client.xtrim(STREAM, maxlen=1, approximate=False)


async def delete_group(client: redis.asyncio.Redis) -> None:
    await client.xgroup_destroy(STREAM, "controller")


async def delete_bytes(client: redis.asyncio.Redis) -> None:
    await client.delete(BYTES)


async def spoil_bytes(client: redis.asyncio.Redis) -> None:
    await client.set(BYTES, "many")


async def flush(client: redis.asyncio.Redis) -> None:
    await client.flushall()


@pytest.mark.parametrize(
    ("lose", "shows"),
    [
        (
            delete_stream,
            "lost data of run run: the stream or its group is gone; " + WHAT_TO_DO,
        ),
        (
            delete_group,
            "lost data of run run: the stream or its group is gone; " + WHAT_TO_DO,
        ),
        (flush, "lost data of run run: the stream or its group is gone; " + WHAT_TO_DO),
        (
            lose_an_unread_entry,
            "run run: it counts 5 entries added, and 4 came; " + WHAT_TO_DO,
        ),
        (
            trim_stream,
            "lost data of run run: it has 1 of 3 entries that wait; " + WHAT_TO_DO,
        ),
        (delete_bytes, "does not know run run: the controller opens its queue first"),
        (
            spoil_bytes,
            "bytes holds b'many', which is no number of bytes; delete this key",
        ),
    ],
)
async def test_a_receiver_notices_what_is_lost_beside_it(
    server, administrator, lose, shows
):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with (
            asyncio.timeout(LIMIT_S),
            RedisReceiver(server.url(), "run", without_seal) as receiver,
        ):
            async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
                for number in range(4):
                    await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
                received = [await receiver.get() for _ in range(4)]
            await receiver.acknowledge([received[0].trajectory_id])
            while await administrator.xlen(STREAM) != 3:
                await asyncio.sleep(0.005)
            await lose(administrator)
            await asyncio.Event().wait()
    (message,) = causes(caught.value)
    assert message.startswith(f"redis at {server.address}")
    assert shows in message
    assert "\n" not in message


@pytest.mark.parametrize("lose", [delete_stream, delete_bytes, spoil_bytes, flush])
async def test_a_sender_notices_a_loss_and_never_counts_below_zero(
    server, administrator, lose
):
    async with (
        RedisReceiver(server.url(), "run", without_seal) as receiver,
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
    (message,) = causes(caught.value)
    assert message.startswith(f"redis at {server.address}")


async def test_a_wrong_count_of_bytes_is_put_right(server, administrator):
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal) as receiver,
        RedisSender(server.url("rollout"), "run", 1_000) as sender,
    ):
        await administrator.incrby(BYTES, 1 << 62)
        # The sender waits until the receiver has looked.
        await sender.put(name(0), b"x" * 900, timeout_s=LIMIT_S)
        await administrator.incrby(BYTES, -5_000)
        await until(lambda: sender.queued_bytes == 900)
        await receiver.acknowledge([(await receiver.get()).trajectory_id])


async def test_an_answer_that_was_lost_leaves_no_wrong_count(server, administrator):
    """The receiver deletes again what it has deleted: here another client did the first time."""
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal) as receiver,
    ):
        async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
            for number in range(2):
                await sender.put(name(number), b"x" * 400, timeout_s=LIMIT_S)
            deliveries = [await receiver.get() for _ in range(2)]
            async with receiver._counting:
                (entry_id,) = receiver._entries[deliveries[0].trajectory_id]
                async with administrator.pipeline(transaction=True) as pipeline:
                    pipeline.xack(STREAM, GROUP, entry_id)
                    pipeline.xdel(STREAM, entry_id)
                    pipeline.incrby(BYTES, -400)
                    await pipeline.execute()
                await receiver.acknowledge([deliveries[0].trajectory_id])
        await until(lambda: not receiver._to_forget)
        while int(await administrator.get(BYTES)) != 400:
            await asyncio.sleep(0.005)
        await receiver.acknowledge([deliveries[1].trajectory_id])
    assert int(await administrator.get(BYTES)) == 0


async def test_a_server_older_than_seven_is_refused_at_connect(server, monkeypatch):
    async def scan(*_):
        # The answer of a server of 6.2: it has no count of added entries.
        return [], [b"length", 0, b"last-generated-id", b"0-0", b"groups", []], None

    monkeypatch.setattr(RedisReceiver, "_scan", scan)
    with pytest.raises(ConfigError) as caught:
        async with RedisReceiver(server.url(), "run", without_seal):
            pass
    assert str(caught.value) == (
        f"redis at {server.address} is older than 7.0 and does not count the entries that were "
        "added: the queue needs Redis or Valkey from 7.0 on"
    )


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


async def test_older_files_are_noticed_by_the_receiver(
    server: EmbeddedServer, tmp_path: Path
):
    folder = tmp_path / "valkey" / "appendonlydir"
    with pytest.raises(BaseExceptionGroup) as caught:
        async with (
            asyncio.timeout(2 * LIMIT_S),
            RedisReceiver(server.url(), "run", without_seal) as receiver,
            RedisSender(server.url("rollout"), "run", 10_000) as sender,
        ):
            await sender.put(name(0), b"x" * 100, timeout_s=LIMIT_S)
            await receiver.acknowledge([(await receiver.get()).trajectory_id])
            async with older_files(server, folder):
                await sender.put(name(1), b"x" * 100, timeout_s=LIMIT_S)
                # Entries that it holds and does not give up are not lost, and yet Redis counts
                # less.
                await receiver.acknowledge([(await receiver.get()).trajectory_id])
            await asyncio.Event().wait()
    (message,) = causes(caught.value)
    assert "lost data of run run: it counts 1 entries added, and 2 came; " in message


async def test_what_older_files_lack_is_missing_in_the_next_delivery(server, tmp_path):
    """Lost before the receiver had read it: only the sender's count shows it."""
    async with RedisReceiver(server.url(), "run", without_seal):
        pass
    folder = tmp_path / "valkey" / "appendonlydir"
    async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
        await sender.put(name(0), b"x" * 100, timeout_s=LIMIT_S, tokens=3)
        async with older_files(server, folder):
            await sender.put(name(1), b"x" * 100, timeout_s=LIMIT_S, tokens=4)
        await sender.put(name(2), b"x" * 100, timeout_s=LIMIT_S, tokens=5)
    # Ids without a server epoch count as one server.
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal) as receiver,
    ):
        deliveries = [await receiver.get() for _ in range(2)]
    assert [delivery.trajectory_id for delivery in deliveries] == [name(0), name(2)]
    assert [delivery.sent for delivery in deliveries] == [Tally(1, 3), Tally(1, 5)]


@pytest.mark.parametrize("lose", [trim_stream, delete_bytes])
async def test_the_next_receiver_delivers_what_is_left(
    server, administrator, lose
) -> None:
    async with RedisReceiver(server.url(), "run", without_seal) as first:
        assert first.is_new
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            for number in range(3):
                await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            for _ in range(3):
                await first.get()
    await lose(administrator)
    num_entries = await administrator.xlen(STREAM)
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal) as second,
    ):
        assert not second.is_new
        assert second.added == first.added == 3
        assert len(second.backlog) == num_entries
        async with RedisSender(server.url("rollout"), "run", 10_000) as sender:
            assert sender.queued_bytes == 100 * num_entries
            await sender.put(name(9), b"x" * 100, timeout_s=LIMIT_S)
            names = [(await second.get()).trajectory_id for _ in range(num_entries + 1)]
            assert names == [*(name(number) for number in range(3))][
                3 - num_entries :
            ] + [name(9)]
            await second.acknowledge(names)
            await until(lambda: not sender.queued_bytes)


async def test_a_sender_delivers_what_it_holds_to_a_controller_that_begins_anew(
    server: EmbeddedServer, administrator: redis.asyncio.Redis
) -> None:
    async with RedisReceiver(server.url(), "run", without_seal):
        pass
    async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
        await sender.put(name(0), b"x" * 900, timeout_s=LIMIT_S)
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(
                sender.put(name(1), b"x" * 900, timeout_s=LIMIT_S)
            )
            await asyncio.sleep(0)
            assert not waits.done()
            async with administrator.pipeline(transaction=True) as pipeline:
                # A controller that begins after a flush does this in one moment.
                pipeline.flushall()
                pipeline.set(BYTES, 0)
                pipeline.xgroup_create(STREAM, "controller", id="0", mkstream=True)
                await pipeline.execute()
        async with (
            asyncio.timeout(LIMIT_S),
            RedisReceiver(server.url(), "run", without_seal) as receiver,
        ):
            assert (await receiver.get()).trajectory_id == name(1)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (
            dict(sent={"trajectories": 2**64 - 1}),
            "sent.trajectories must be between 0 and 1e+15",
        ),
        (
            dict(sent={"tokens": 10**18}),
            "sent.tokens must be between 0 and 1e+15, got 10000000000",
        ),
        (
            dict(tokens=2**64 - 1),
            "DeliverRequest.tokens must be between 0 and 4.1943e+06",
        ),
        (
            dict(trajectory_id="g" * 200),
            "trajectory_id must have at most 128 bytes, got 200",
        ),
        (
            dict(trajectory_id="g\x1b[2J"),
            "trajectory_id must hold ASCII letters, digits and",
        ),
    ],
)
async def test_an_entry_out_of_the_bounds_of_grpc_is_removed_with_its_cause(
    server, administrator, caplog, bad, rule
):
    facts = {"trajectory": b"x" * 8, "trajectory_id": "group.1", "tokens": 3, **bad}
    sent = facts.pop("sent", {"trajectories": 1, "tokens": 3})
    request = trajectory_pb2.DeliverRequest(**facts, sent=trajectory_pb2.Amount(**sent))
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal) as receiver,
    ):
        await administrator.xadd(STREAM, {DELIVERY: request.SerializeToString()})
        async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
            await sender.put(name(2), b"x", timeout_s=LIMIT_S)
        assert (await receiver.get()).trajectory_id == name(2)
        await until(lambda: "is removed: " in caplog.text)
    assert rule in caplog.text
    assert "\x1b" not in caplog.text
    pending = await administrator.xpending(STREAM, GROUP)
    assert pending["pending"] == await administrator.xlen(STREAM) == 1
    assert CONSUMER.encode() in {consumer["name"] for consumer in pending["consumers"]}


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[Callable[[str], str]]:
    """Debian's Redis with the documented rights; its address for a user."""
    socket = folder / "r.sock"
    users = [f"user {user.name} on >secret {user.rules}" for user in USERS.values()]
    lines = [DEFAULT_USER, *users]
    (folder / "users.acl").write_text("".join(f"{line}\n" for line in lines))
    command = [
        REDIS_SERVER,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(folder),
    ]
    command += [
        "--aclfile",
        str(folder / "users.acl"),
        "--save",
        "",
        "--appendonly",
        "yes",
    ]
    command += ["--appendfsync", "always"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL
    )

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
async def test_debians_redis_keeps_everything_with_the_documented_rights(
    tmp_path: Path,
) -> None:
    async with (
        redis_server(tmp_path) as url,
        RedisReceiver(url("controller"), "run", without_seal) as first,
        RedisSender(url("rollout"), "run", 10_000) as sender,
    ):
        for number in range(10):
            await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
        await first.acknowledge([(await first.get()).trajectory_id])
    # Killed by the end of the block.
    async with (
        redis_server(tmp_path) as url,
        asyncio.timeout(LIMIT_S),
        RedisReceiver(url("controller"), "run", without_seal) as second,
    ):
        assert second.added == 10
        assert [(await second.get()).trajectory_id for _ in range(9)] == [
            name(number) for number in range(1, 10)
        ]


async def test_an_entry_of_another_release_is_named_and_not_read_in_part(
    server, administrator, caplog
):
    async with (
        asyncio.timeout(LIMIT_S),
        RedisReceiver(server.url(), "run", without_seal),
    ):
        request = trajectory_pb2.DeliverRequest(trajectory=b"x", trajectory_id=name(0))
        # A field that this release does not know.
        data = request.SerializeToString() + b"\xf8\x7c\x07"
        await administrator.xadd(STREAM, {DELIVERY: data})
        await until(lambda: "is of another release: a field" in caplog.text)
    assert "is removed: entry" in caplog.text
