"""What only the Redis queue promises: it outlives every process but notices a lost Redis."""

import asyncio
import logging
import os
import random
import shutil
import signal

import pytest
import redis.asyncio
from slipstream.core.errors import ConfigError, QueueError, TrajectoryQueueFull
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.connection import RedisConnection
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import RedisReceiver
from support.fakes.queue_seals import without_seal
from support.rigs.valkey import BYTES, STREAM, EmbeddedServer, causes, kill, name
from support.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.process


@pytest.fixture
async def server(server: EmbeddedServer) -> EmbeddedServer:
    """A server on which a controller has opened the run's queue."""
    async with RedisReceiver(server.url(), "run", without_seal):
        return server


async def get(receiver: RedisReceiver) -> str:
    async with asyncio.timeout(LIMIT_S):
        return (await receiver.get()).trajectory_id


async def used_bytes(client: redis.asyncio.Redis) -> int:
    return int(await client.get(BYTES))


async def becomes_empty(client: redis.asyncio.Redis) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await client.xlen(STREAM):
            await asyncio.sleep(0.005)
    assert await used_bytes(client) == 0


async def test_nothing_that_put_has_answered_is_lost_when_redis_is_killed_again_and_again(
    server,
):
    generator = random.Random(1)
    answered: set[str] = set()
    arrived: set[str] = set()
    finished = asyncio.Event()

    async def produce(sender: RedisSender, first: int) -> None:
        number = first
        while not finished.is_set():
            await sender.put(name(number), b"x" * 1_000, timeout_s=LIMIT_S)
            answered.add(name(number))
            number += 1

    async def consume(receiver: RedisReceiver) -> None:
        while True:
            trajectory_id = (await receiver.get()).trajectory_id
            arrived.add(trajectory_id)
            await receiver.acknowledge([TrajectoryId(trajectory_id)])

    async with (
        RedisSender(server.url("rollout"), "run", 100_000) as sender,
        RedisReceiver(server.url(), "run", without_seal) as receiver,
        asyncio.TaskGroup() as group,
    ):
        producers = [
            group.create_task(produce(sender, start)) for start in (0, 1_000_000)
        ]
        consumer = group.create_task(consume(receiver))
        for _ in range(5):
            seen = len(arrived)
            await until(lambda seen=seen: len(arrived) >= seen + 20)
            await asyncio.sleep(generator.random() * 0.05)
            await kill(server)
            await server.start()
        finished.set()
        await asyncio.wait(producers)
        await until(
            lambda: not (not answered <= arrived or sender.queued_bytes), LIMIT_S
        )
        async with (
            redis.asyncio.Redis.from_url(server.url("administrator")) as client,
            asyncio.timeout(LIMIT_S),
        ):
            # The count of the dead server is corrected while the receiver is open.
            while await client.xlen(STREAM) or await used_bytes(client):
                await asyncio.sleep(0.005)
            assert (await client.xpending(STREAM, "controller"))["pending"] == 0
        consumer.cancel()


async def test_what_a_dead_controller_had_read_comes_again(
    server: EmbeddedServer,
) -> None:
    async with RedisSender(server.url("rollout"), "run", 100_000) as sender:
        async with RedisReceiver(server.url(), "run", without_seal) as first:
            for number in range(50):
                await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
            assert await get(first) == name(0)
        async with RedisReceiver(server.url(), "run", without_seal) as second:
            assert [await get(second) for _ in range(50)] == [
                name(n) for n in range(50)
            ]
            await second.acknowledge(name(n) for n in range(50))
        async with redis.asyncio.Redis.from_url(server.url("administrator")) as client:
            assert await client.xlen(STREAM) == 0


async def test_an_entry_that_was_added_twice_is_delivered_once_and_deleted_twice(
    server,
):
    async with (
        RedisReceiver(server.url(), "run", without_seal) as receiver,
        RedisSender(server.url("rollout"), "run", 1_000) as sender,
        redis.asyncio.Redis.from_url(server.url("administrator")) as client,
    ):
        for number in (1, 1, 2):
            await sender.put(name(number), b"x" * 100, timeout_s=LIMIT_S)
        assert [await get(receiver), await get(receiver)] == [name(1), name(2)]
        await receiver.acknowledge([name(1)])
        async with asyncio.timeout(LIMIT_S):
            while await client.xlen(STREAM) != 1:
                await asyncio.sleep(0.005)
        # An acknowledged trajectory that comes again is acknowledged again.
        await sender.put(name(1), b"x" * 100, timeout_s=LIMIT_S)
        await receiver.acknowledge([name(2)])
        await receiver.acknowledge([TrajectoryId(await get(receiver))])
        await becomes_empty(client)


async def test_senders_share_one_bound(server: EmbeddedServer) -> None:
    async with (
        RedisReceiver(server.url(), "run", without_seal) as receiver,
        RedisSender(server.url("rollout"), "run", 1_000) as first,
        RedisSender(server.url("rollout"), "run", 1_000) as second,
        redis.asyncio.Redis.from_url(server.url("administrator")) as client,
    ):
        largest = 0

        async def produce(sender: RedisSender, numbers: range) -> None:
            nonlocal largest
            for number in numbers:
                await sender.put(name(number), b"x" * 300, timeout_s=LIMIT_S)
                largest = max(largest, await used_bytes(client))

        async with asyncio.TaskGroup() as group:
            group.create_task(produce(first, range(20)))
            group.create_task(produce(second, range(20, 40)))
            while await used_bytes(client) < 900:
                await asyncio.sleep(0.005)
            for _ in range(40):
                await receiver.acknowledge([TrajectoryId(await get(receiver))])
        assert largest <= 900
        await becomes_empty(client)


async def test_runs_on_one_server_do_not_see_each_other(server: EmbeddedServer) -> None:
    async with (
        RedisReceiver(server.url(), "other", without_seal) as receiver,
        RedisSender(server.url("rollout"), "run", 1_000) as sender,
    ):
        await sender.put(name(1), b"x", timeout_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.get(), 0.1)


async def test_a_redis_that_stays_away_is_reported_with_its_name_and_without_its_password(
    server, monkeypatch
):
    monkeypatch.setattr(RedisConnection, "reconnect_timeout_s", 0.3)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with RedisReceiver(server.url(), "run", without_seal) as receiver:
            await kill(server)
            await get(receiver)
    (message,) = causes(caught.value)
    assert "valkey.sock does not answer within 0.3 s" in message
    # The server may have ended of itself, which only its own log says.
    assert message.endswith(
        "; its own log says more: it ends, for example, when its disk is full"
    )
    assert server.password_file("controller").read_text() not in message
    with pytest.raises(QueueError, match="does not answer within 0.2 s"):
        async with RedisSender(server.url("rollout"), "run", 1_000, patience_s=0.2):
            pass


async def test_put_names_a_lost_redis_and_may_be_tried_again(
    server: EmbeddedServer,
) -> None:
    async with RedisSender(
        server.url("rollout"), "run", 1_000, patience_s=LIMIT_S
    ) as sender:
        await kill(server)
        # The dispatcher tries again after this error: the server and its engine live on.
        with pytest.raises(TrajectoryQueueFull, match="does not answer within 0.2 s"):
            await sender.put(name(0), b"x", timeout_s=0.2)


async def test_put_does_not_call_a_silent_redis_full(server: EmbeddedServer) -> None:
    async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            message = (
                "valkey.sock has room for 1 bytes and did not store them within 0.2 s$"
            )
            with pytest.raises(TrajectoryQueueFull, match=message):
                await sender.put(name(0), b"x", timeout_s=0.2)
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_a_redis_that_accepts_calls_and_is_silent_is_told_with_a_cause(server):
    async def silent() -> None:
        # asyncio.timeout raises it without a word.
        raise TimeoutError

    connection = RedisConnection(server.url(), "run")
    connection.reconnect_timeout_s = 0.1
    with pytest.raises(
        QueueError, match=r"within 0.1 s: a call had no answer for 10 s; its own"
    ):
        await connection.persistently(silent)
    await connection.client.aclose()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("appendfsync", "everysec"),
        ("maxmemory-policy", "allkeys-lru"),
        ("no-appendfsync-on-rewrite", "yes"),
    ],
)
async def test_a_redis_that_may_lose_entries_is_refused(server, setting, value):
    async with redis.asyncio.Redis.from_url(server.url("administrator")) as client:
        await client.config_set(setting, value)
    with pytest.raises(QueueError, match=rf"{setting} must be \w+ .*, got {value}"):
        async with RedisReceiver(server.url(), "run", without_seal):
            pass


async def set_user(server: EmbeddedServer, *rules: str) -> str:
    """A user with these rights; the address for it."""
    async with redis.asyncio.Redis.from_url(server.url("administrator")) as client:
        await client.execute_command("ACL", "SETUSER", "other", "on", ">secret", *rules)
    return f"{server.address}?username=other&password=secret"


async def test_a_redis_that_hides_its_settings_is_used_with_a_warning(server, caplog):
    url = await set_user(server, "~slipstream:*", "+@all", "-config")
    with caplog.at_level(logging.WARNING):
        async with (
            RedisReceiver(url, "run", without_seal),
            RedisSender(url, "run", 1_000) as sender,
        ):
            await sender.put(name(0), b"x", timeout_s=LIMIT_S)
    assert "does not show its settings" in caplog.text
    assert "secret" not in caplog.text


async def test_a_wrong_password_is_reported_at_once_with_the_user(
    server: EmbeddedServer,
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with RedisSender(server.url("rollout") + "x", "run", 1_000):
            pass
    assert str(caught.value) == (
        f"redis at {server.address}: user rollout: "
        "invalid username-password pair or user is disabled."
    )


async def test_a_missing_right_on_keys_ends_a_sender_without_its_data_in_the_message(
    server,
):
    # The server's own message names neither command nor key.
    url = await set_user(server, "+@all", "resetkeys", "~*:bytes")
    with pytest.raises((ConfigError, BaseExceptionGroup)) as caught:
        async with RedisSender(url, "run", 1_000) as sender:
            await sender.put(name(0), b"what the model said", timeout_s=LIMIT_S)
    assert causes(caught.value) == {
        f"redis at {server.address}: user other lacks the right to xadd on the keys of run run; "
        "docs/security.md has the lines that give all rights"
    }


async def test_a_sender_does_not_begin_before_the_controller_has(
    server: EmbeddedServer,
) -> None:
    with pytest.raises(
        QueueError, match="does not know run new: the controller opens its queue"
    ):
        async with RedisSender(server.url("rollout"), "new", 1_000):
            pass


async def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(QueueError, match=r"queue.redis_url http://localhost: "):
        RedisSender("http://localhost", "run", 1_000)


async def test_an_empty_redis_after_a_restart_stops_sender_and_receiver(
    server, tmp_path
):
    async def lose_everything() -> None:
        await kill(server)
        shutil.rmtree(tmp_path / "valkey" / "appendonlydir")
        await server.start()

    with pytest.raises(BaseExceptionGroup) as caught:
        async with RedisReceiver(server.url(), "run", without_seal) as receiver:
            await lose_everything()
            await get(receiver)
    (cause,) = causes(caught.value)
    assert "lost data of run run: the stream or its group is gone" in cause
    async with RedisReceiver(server.url(), "run", without_seal):
        pass
    with pytest.raises(BaseExceptionGroup) as caught:
        async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
            await sender.put(name(0), b"x", timeout_s=LIMIT_S)
            await lose_everything()
            await sender.put(name(1), b"x", timeout_s=LIMIT_S)
    (cause,) = causes(caught.value)
    assert "does not know run run: " in cause
