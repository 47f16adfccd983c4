"""A worker's end of NCCL without a GPU: cupy and torch's streams, which tell times, are fakes."""

import os
from collections.abc import Iterator

import pytest
import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.nccl_group import AGREED, NcclGroup, agreed_settings
from slipstream.rollout_server.vllm import nccl_receiver
from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import Incoming
from slipstream.v1 import weights_pb2
from support.fakes import fake_cupy, fake_streams
from vllm.utils import nccl

DEVICE = torch.device("cuda", 0)
BROADCAST = 4.0
DIGEST = 1.0
COPY = 2.0
NUM_BUCKETS = 5
BUCKETS = tuple(
    plan_buckets(
        [TensorSpec(f"w{n}", "bfloat16", (512,)) for n in range(NUM_BUCKETS)], 1024
    )
)


class Digests:
    """Takes time where it is told to."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def add(self, place: int, pointer: int, stream: int) -> None:
        self.places.append(place)
        fake_streams.Stream.by_handle[stream].work(DIGEST)


@pytest.fixture
def cupy() -> Iterator[fake_cupy.FakeCupy]:
    nccl_receiver._STREAMS.clear()
    with fake_cupy.installed() as cupy:
        yield cupy
    nccl_receiver._STREAMS.clear()


@pytest.fixture
def consumer(cupy, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_streams.Stream]:
    def broadcast(group, pointer, num_bytes, root, stream, *, deadline_s):
        # The first one only opens connections, on a stream of its own.
        if num_bytes == BUCKETS[0].num_bytes:
            fake_streams.Stream.by_handle[stream].work(BROADCAST)

    with fake_streams.installed() as consumer:
        monkeypatch.setattr(NcclGroup, "broadcast", broadcast)
        monkeypatch.setattr(
            NcclReceiver, "_room", lambda _, size: torch.empty(size).byte()
        )
        yield consumer


def join() -> NcclReceiver:
    return NcclReceiver(weights_pb2.Communicator(world_size=2), 1, 30.0, DEVICE)


def prepared(*, own_buffers: bool) -> tuple[NcclReceiver, Incoming]:
    """A member, and what it is prepared to receive, whose digests take time."""
    transport = join()
    incoming = Incoming(BUCKETS, bucket_deadline_s=1.0, own_buffers=own_buffers)
    transport.prepare(incoming)
    transport._digests = Digests()
    return transport, incoming


@pytest.mark.parametrize("own_buffers", [False, True])
def test_copies_of_a_bucket_run_while_the_next_one_arrives(consumer, own_buffers):
    transport, incoming = prepared(own_buffers=own_buffers)
    arrived = []
    for _ in transport.receive(incoming):
        arrived.append(consumer.time - DIGEST)
        consumer.work(COPY)
    assert arrived == [BROADCAST * (n + 1) for n in range(NUM_BUCKETS)]
    assert transport._digests.places == list(range(NUM_BUCKETS))
    assert consumer.time == NUM_BUCKETS * BROADCAST + DIGEST + COPY
    transport.close()


def test_two_buckets_arrive_while_the_engines_steps_end(
    consumer: fake_streams.Stream,
) -> None:
    transport, incoming = prepared(own_buffers=False)
    (link,) = nccl_receiver._STREAMS[DEVICE]
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
    join().close()
    (stream,) = nccl_receiver._STREAMS[DEVICE]
    assert stream.priority < consumer.priority


def test_kernel_of_digests_is_loaded_before_the_others_wait(cupy, consumer) -> None:
    join().close()
    assert cupy.seen == ["digest 0 spans", "join"]


@pytest.mark.parametrize("has_no_cache", [True, False])
def test_settings_that_vllm_pins_for_its_own_communicators_are_not_ours(
    has_no_cache: bool, cupy, consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pins under `VLLM_BATCH_INVARIANT`; members that differ wait for each other for ever.

    NCCL before 2.29.7 has no NCCL_NO_CACHE, and vLLM then does not undo it.
    """
    for name in (*AGREED, "NCCL_NO_CACHE"):
        # Set first, so that it is put back whatever vLLM makes of it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setattr(nccl_receiver, "_LAUNCHED", {"NCCL_PROTO": "LL"})
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: has_no_cache)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple", "NCCL_ALGO": "ring"})
    pinned = {"NCCL_PROTO": "simple", "NCCL_ALGO": "ring"}
    assert agreed_settings(os.environ) == pinned
    join().close()
    assert cupy.settings == [
        {"NCCL_PROTO": "ll", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    ]
    assert agreed_settings(os.environ) == pinned
    assert ("NCCL_NO_CACHE" in os.environ) == has_no_cache


def test_communicators_one_after_the_other_use_one_stream(
    cupy, consumer, monkeypatch
) -> None:
    for _ in range(3):
        join().close()
    assert [communicator.num_aborts for communicator in cupy.communicators] == [1, 1, 1]
    assert len(nccl_receiver._STREAMS[DEVICE]) == 1
    # A communicator that could not be aborted waits there for ever.
    monkeypatch.setattr(fake_streams.Stream, "query", lambda _: False)
    join().close()
    assert len(nccl_receiver._STREAMS[DEVICE]) == 2
