"""A network that stops or turns before Redis: nobody waits without a limit, nothing is lost."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from slipstream.core.errors import ConfigError, QueueError
from slipstream.extensions.redis import connection
from slipstream.extensions.redis.connection import RedisConnection
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import RedisReceiver
from support.fakes.queue_seals import without_seal
from support.rigs.bad_network import BadNetwork
from support.rigs.valkey import ROLLOUT_SERVER, EmbeddedServer, causes, name
from support.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.process


@pytest.fixture
async def network(server: EmbeddedServer) -> AsyncIterator[BadNetwork]:
    async with BadNetwork(f"unix:{server.address.removeprefix('unix://')}") as network:
        yield network


def url_through(network: BadNetwork, server: EmbeddedServer) -> str:
    user = ROLLOUT_SERVER.name
    password = server.password_file(user).read_text()
    return f"redis://{network.address}?username={user}&password={password}"


async def test_a_transaction_whose_answer_never_comes_ends_in_time(
    server, network, monkeypatch
):
    """Redis watches a key for it, and redis-py waits without a limit to say that this is over."""
    async with RedisReceiver(server.url(), "run", without_seal):
        pass
    monkeypatch.setattr(connection, "CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection.RedisConnection, "reconnect_timeout_s", 0.1)
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            asyncio.timeout(LIMIT_S),
            RedisSender(url_through(network, server), "run", 1_000) as sender,
        ):
            network.trap = b"EXEC"
            await sender.put(name(0), b"x", timeout_s=LIMIT_S)
    (cause,) = causes(caught.value)
    assert f"redis at redis://{network.address} does not answer within 0.1 s" in cause
    assert "a call had no answer for 0.5 s" in cause


async def test_a_receiver_says_what_redis_did_not_do(server, monkeypatch, caplog):
    # A read waits for a second for an entry.
    monkeypatch.setattr(connection, "CALL_TIMEOUT_S", 0.5)
    warning = f"redis at {server.address}: a call had no answer for 0.5 s"
    async with RedisReceiver(server.url(), "run", without_seal):
        # On a busy machine another call may be late before.
        await until(lambda: warning in caplog.messages)


async def test_a_primary_that_is_a_replica_for_a_while_loses_and_repeats_nothing(
    server, administrator, caplog
):
    """A service fails over, and its name leads to the old primary still."""
    with caplog.at_level(logging.WARNING):
        async with (
            RedisReceiver(server.url(), "run", without_seal) as receiver,
            RedisSender(server.url("rollout"), "run", 100_000) as sender,
            asyncio.timeout(LIMIT_S),
        ):
            for number in range(4):
                await sender.put(name(number), b"x", timeout_s=LIMIT_S)
            await administrator.execute_command("REPLICAOF", "127.0.0.1", "1")
            putting = asyncio.create_task(sender.put(name(4), b"x", timeout_s=LIMIT_S))
            # The receiver and the sender.
            await until(
                lambda: (
                    caplog.text.count("was lost: You can't write against a read") == 2
                )
            )
            await administrator.execute_command("REPLICAOF", "NO", "ONE")
            await putting
            took = [(await receiver.get()).trajectory_id for _ in range(5)]
            await receiver.acknowledge(took)
            await until(lambda: sender.queued_bytes == 0)
    assert took == [name(number) for number in range(5)]


async def test_a_replica_is_not_told_as_a_loss_of_data(
    server, administrator, monkeypatch
):
    monkeypatch.setattr(connection.RedisConnection, "reconnect_timeout_s", 0.1)
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            asyncio.timeout(LIMIT_S),
            RedisReceiver(server.url(), "run", without_seal),
        ):
            await administrator.execute_command("REPLICAOF", "127.0.0.1", "1")
            await asyncio.sleep(LIMIT_S)
    (cause,) = causes(caught.value)
    assert "within 0.1 s: You can't write against a read only replica" in cause


async def test_each_outage_is_told_and_none_is_remembered_once_redis_answers(
    caplog,
) -> None:
    redis_connection = RedisConnection("redis://127.0.0.1:9", "run")
    answers = [
        RedisConnectionError("refused"),
        None,
        RedisConnectionError("reset"),
        None,
    ]

    async def call() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    for cause in ("refused", "reset"):
        caplog.clear()
        await redis_connection.persistently(call)
        # Otherwise a full queue would be told as a lost Redis.
        assert redis_connection.trouble is None
        assert [record.getMessage() for record in caplog.records] == [
            f"redis at redis://127.0.0.1:9 was lost: {cause}",
            "redis at redis://127.0.0.1:9 answers again",
        ]
    await redis_connection.client.aclose()


async def test_a_node_of_a_cluster_is_named_as_such() -> None:
    async with BadNetwork("127.0.0.1:9") as network:
        network.page = b"-MOVED 12182 10.0.0.7:6379\r\n"
        message = (
            rf"redis://{network.address} is part of a cluster, which .* run at "
            rf"10.0.0.7:6379: "
        )
        with pytest.raises(ConfigError, match=message):
            async with RedisSender(f"redis://{network.address}", "run", 1_000):
                pass


async def test_a_full_redis_is_told_in_its_words(server, administrator):
    async with RedisReceiver(server.url(), "run", without_seal):
        pass
    await administrator.config_set("maxmemory", 1)
    with pytest.raises(ExceptionGroup) as caught:
        async with RedisSender(server.url("rollout"), "run", 1_000) as sender:
            with pytest.raises(QueueError):
                await sender.put(name(0), b"x", timeout_s=LIMIT_S)
    message = "command not allowed when used memory > 'maxmemory'."
    assert causes(caught.value) == {f"redis at {server.address}: {message}"}
