"""Nothing but the last bucket's copies comes behind the wire: times of streams that are fakes."""

from collections.abc import Iterator

import pytest
import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.nccl_group import NcclGroup
from slipstream.rollout_server.vllm import nccl_receiver
from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.v1 import weights_pb2
from support.fakes import fake_cupy, fake_streams

BROADCAST, DIGEST, COPY = 4.0, 1.0, 2.0
NUM_BUCKETS = 5
BUCKETS = tuple(
    plan_buckets([TensorSpec(f"w{n}", "bfloat16", (512,)) for n in range(NUM_BUCKETS)], 1024)
)


class Digests:
    """Takes time where it is told to."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def add(self, place: int, pointer: int, stream: int) -> None:
        self.places.append(place)
        fake_streams.Stream.by_handle[stream].work(DIGEST)


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_streams.Stream]:
    def broadcast(group, pointer, num_bytes, root, stream, *, deadline_s):
        # The first one only opens connections, on a stream of its own.
        if num_bytes == BUCKETS[0].num_bytes:
            fake_streams.Stream.by_handle[stream].work(BROADCAST)

    nccl_receiver._STREAMS.clear()
    with fake_cupy.installed(), fake_streams.installed() as consumer:
        monkeypatch.setattr(NcclGroup, "broadcast", broadcast)
        monkeypatch.setattr(NcclReceiver, "_room", lambda _, size: torch.empty(size).byte())
        yield consumer
    nccl_receiver._STREAMS.clear()


@pytest.mark.parametrize("own_buffers", [False, True])
def test_copies_of_a_bucket_run_while_the_next_one_arrives(consumer, own_buffers):
    membership = Seat(weights_pb2.Communicator(world_size=2), rank=1, join_deadline_s=30.0)
    transport = NcclReceiver(membership, torch.device("cuda", 0))
    incoming = Incoming(BUCKETS, bucket_deadline_s=1.0, own_buffers=own_buffers)
    transport.prepare(incoming)
    transport._digests = digests = Digests()
    arrived = []
    for _ in transport.receive(incoming):
        arrived.append(consumer.time - DIGEST)
        consumer.work(COPY)
    assert arrived == [BROADCAST * (n + 1) for n in range(NUM_BUCKETS)]
    assert digests.places == list(range(NUM_BUCKETS))
    assert consumer.time == NUM_BUCKETS * BROADCAST + DIGEST + COPY
    transport.close()


def test_two_buckets_arrive_while_the_engines_steps_end(consumer: fake_streams.Stream) -> None:
    membership = Seat(weights_pb2.Communicator(world_size=2), rank=1, join_deadline_s=30.0)
    transport = NcclReceiver(membership, torch.device("cuda", 0))
    incoming = Incoming(BUCKETS, bucket_deadline_s=1.0, own_buffers=False)
    transport.prepare(incoming)
    transport._digests = Digests()
    (link,) = nccl_receiver._STREAMS[torch.device("cuda", 0)]
    consumer.work(100.0)
    ended = []
    for _ in transport.receive(incoming):
        ended.append(link.time)
        consumer.work(COPY)
    # The third one overwrites the first, which is copied behind the steps.
    first_copied = 100.0 + DIGEST + COPY
    assert ended[:2] == [2 * BROADCAST, first_copied + BROADCAST]
    transport.close()


def test_broadcasts_come_before_copies_where_processors_are_scarce(consumer):
    membership = Seat(weights_pb2.Communicator(world_size=2), rank=1, join_deadline_s=30.0)
    NcclReceiver(membership, torch.device("cuda", 0)).close()
    (stream,) = nccl_receiver._STREAMS[torch.device("cuda", 0)]
    assert stream.priority < consumer.priority
