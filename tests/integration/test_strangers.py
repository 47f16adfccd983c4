"""Strangers on open ports: what they send, or do not send, delays no member beyond a deadline."""

import asyncio
import contextlib
import random
import resource
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc.aio
import psutil
import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.machine.address import free_port
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.ranks.rendezvous import rendezvous
from slipstream.learner.trainer.weights.bucket_senders import GlooSender
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE
from slipstream.protocol.access.security import call_metadata
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.rollout_server.weights.bucket_receiver import GlooReceiver, Incoming
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.guarded_controller import TOKEN, serving, with_token
from support.rigs.loopbacks import LOOPBACKS
from support.rigs.waiting import LIMIT_S, wait_until

HOST = "127.0.0.1"


def noise() -> list[bytes]:
    """Nothing, another protocol, random bytes, and impossible sizes."""
    generator = random.Random(1)
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        generator.randbytes(4096),
        bytes(4096),
        b"\xff" * 4096,
        # torch's store: its magic number in a validation, then a key of 2 ** 62 bytes.
        struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 2**62),
    ]


@contextlib.contextmanager
def strangers(ports: list[int], host: str) -> Iterator[list[socket.socket]]:
    """Connections to all of them that say such things, and stay."""
    with contextlib.ExitStack() as stack:
        opened = []
        for port in ports:
            for words in noise():
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), timeout=LIMIT_S)
                    stack.enter_context(connection)
                    opened.append(connection)
                    connection.sendall(words)
        yield opened


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", LOOPBACKS)
def test_weights_join_beside_strangers(host: str) -> None:
    before = listening_ports()
    weights = WeightsSection(join_deadline_s=LIMIT_S, bucket_deadline_s=LIMIT_S)
    sender = GlooSender(weights, host=host)
    announced = sender.announce("members-secret", num_senders=1, world_size=2)
    (bucket,) = plan_buckets([TensorSpec("w", "float32", (1000,))], 1 << 20)
    data = torch.arange(1000, dtype=torch.float32).view(torch.uint8)
    received = []

    def receive() -> None:
        transport = GlooReceiver(announced, 1, LIMIT_S, torch.device("cpu"))
        incoming = Incoming((bucket,), LIMIT_S, own_buffers=True)
        received.extend(part.clone() for part in transport.receive(incoming))

    receiving = threading.Thread(target=receive)
    with strangers(sorted(listening_ports() - before), host) as opened:
        assert len(opened) == len(noise())
        receiving.start()
        sender.connect(announced, 0)
        # Strangers at the ports that gloo itself opened, too.
        with strangers(sorted(listening_ports() - before), host) as more:
            assert len(more) > len(opened)
            sender.send(bucket, data)()
            sender.finish()
            receiving.join(LIMIT_S)
    sender.abort()
    (got,) = received
    assert torch.equal(got, data)


def test_strangers_alone_do_not_make_a_communicator() -> None:
    before = listening_ports()
    sender = GlooSender(WeightsSection(join_deadline_s=2.0), host=HOST)
    announced = sender.announce("members-secret", num_senders=1, world_size=2)
    with (
        strangers(sorted(listening_ports() - before), HOST),
        pytest.raises(WeightSyncError, match="1 others joining members-secret"),
    ):
        sender.connect(announced, 0)


def test_ranks_meet_beside_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(HOST)
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "secret")
    # vLLM leaves its own in the process that made an engine's settings.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    limit = timedelta(seconds=LIMIT_S)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rendezvous, 0, 2, limit)
        wait_until(lambda: port in listening_ports())
        with strangers([port], HOST):
            second = threads.submit(rendezvous, 1, 2, limit)
            first.result(LIMIT_S).set("key", "value")
            assert second.result(LIMIT_S).get("key") == b"value"


async def test_a_controller_answers_beside_three_hundred_strangers(
    tmp_path: Path,
) -> None:
    token = call_metadata(with_token(TOKEN))
    async with serving(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for number in range(300):
                connection = stack.enter_context(
                    socket.create_connection((HOST, port), 30)
                )
                connection.sendall(noise()[number % 3])
            async with grpc.aio.insecure_channel(address) as channel:
                stub = status_pb2_grpc.StatusServiceStub(channel)
                status = await stub.GetStatus(
                    status_pb2.GetStatusRequest(),
                    metadata=token,
                    timeout=60,
                    wait_for_ready=True,
                )
        assert status.run_id


# Opens so many connections to a port, says nothing, and waits until so many have been closed.
CROWD = """
import resource, selectors, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
port, count, closed = map(int, sys.argv[1:])
waiting = selectors.DefaultSelector()
for _ in range(count):
    waiting.register(socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ)
while closed > 0:
    for found, _ in waiting.select():
        try:
            is_over = not found.fileobj.recv(4096)
        except ConnectionError:
            is_over = True
        if is_over:
            waiting.unregister(found.fileobj)
            closed -= 1
"""


async def test_a_crowd_leaves_a_controller_files_to_open(tmp_path: Path) -> None:
    max_connections = 512
    count = 600
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_connections, limits[1]))
    try:
        async with serving(tmp_path) as address:
            port = address.rpartition(":")[2]
            command = [
                sys.executable,
                "-c",
                CROWD,
                port,
                str(count),
                str(count - max_connections // 2),
            ]
            crowd = await asyncio.create_subprocess_exec(*command)
            assert await asyncio.wait_for(crowd.wait(), LIMIT_S) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
