"""Weights from the learner's shared buffers; both ends are in this process."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.weights.bucket_senders import IpcSender
from slipstream.protocol.weights.digests import HostDigests, bucket_digest
from slipstream.protocol.weights.handover import HandoverSender
from slipstream.rollout_server.weights.bucket_receiver import Incoming, IpcReceiver
from slipstream.v1 import weights_pb2
from support.fakes import fake_cupy
from support.ranks import ipc_learner

BUCKETS = ipc_learner.BUCKETS
LARGEST = max(bucket.num_bytes for bucket in BUCKETS)
CPU = torch.device("cpu")
LONG_S = 30.0


class Ends:
    """A sender whose calls run on a thread, and a receiver that has joined it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        weights = WeightsSection(join_deadline_s=LONG_S, bucket_deadline_s=LONG_S)
        self.sender = IpcSender(weights, CPU, num_bytes=LARGEST)
        self._pool = pool
        where = self.sender.announce("members-1", num_senders=1, world_size=2)
        connecting = pool.submit(self.sender.connect, where, 0)
        self.receiver = IpcReceiver(where, 1, LONG_S, CPU)
        connecting.result(LONG_S)

    def send(self, seed: int) -> Future[object]:
        """Begins to send all buckets, out of one lane that is filled again at once."""

        def send() -> None:
            lane = torch.zeros(LARGEST, dtype=torch.uint8)
            for place, bucket in enumerate(BUCKETS):
                data = lane[: bucket.num_bytes].copy_(ipc_learner.content(seed, place))
                self.sender.send(bucket, data)
            self.sender.finish()

        return self._pool.submit(send)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ThreadPoolExecutor() as pool:
        ends = Ends(pool)
        yield ends
        ends.receiver.close()
        ends.sender.abort()


def incoming(*, own_buffers: bool = False, deadline_s: float = LONG_S) -> Incoming:
    return Incoming(BUCKETS, deadline_s, own_buffers)


def expected(seed: int) -> list[torch.Tensor]:
    return [ipc_learner.content(seed, place) for place in range(len(BUCKETS))]


def digests_of(tensors: list[torch.Tensor]) -> list[bytes]:
    digests = HostDigests(BUCKETS)
    for place, tensor in enumerate(tensors):
        digests.add(place, tensor.data_ptr())
    return [bucket_digest(digests_of_bucket) for digests_of_bucket in digests.read()]


def test_every_bucket_is_read_where_the_learner_put_it(ends: Ends) -> None:
    memory = ends.receiver.prepare(incoming())
    for seed in (1, 2, 3):
        sending = ends.send(seed)
        got = []
        for place, data in enumerate(ends.receiver.receive(incoming())):
            assert data.data_ptr() == memory[place].data_ptr()
            got.append(data.clone())
        sending.result(LONG_S)
        assert all(torch.equal(a, b) for a, b in zip(got, expected(seed), strict=True))
        assert ends.receiver.digests() == digests_of(expected(seed))


def test_own_buffers_stay_when_the_learner_goes_on(ends: Ends) -> None:
    received = []
    for seed in (4, 5):
        sending = ends.send(seed)
        received.append(list(ends.receiver.receive(incoming(own_buffers=True))))
        sending.result(LONG_S)
    for seed, got in zip((4, 5), received, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected(seed), strict=True))


def test_buffers_are_not_left_behind_when_nobody_comes() -> None:
    weights = WeightsSection().model_copy(update={"join_deadline_s": 0.2})
    sender = IpcSender(weights, torch.device("cpu"), num_bytes=64)
    where = sender.announce("nobody", num_senders=1, world_size=2)
    with pytest.raises(
        WeightSyncError, match=r"receivers 1 of nobody did not join within"
    ):
        sender.connect(where, 0)
    assert sender.communicator_id is None
    assert not any(Path("/dev/shm", name).exists() for name in sender._shared.handles)


def test_a_new_communicator_needs_room_for_its_own_buffers_alone(monkeypatch):
    allocate = os.posix_fallocate
    num_mapped: list[int] = []

    def count_then_allocate(descriptor: int, start: int, size: int) -> None:
        maps = Path("/proc/self/maps").read_text()
        num_mapped.append(maps.count("/dev/shm/slipstream-"))
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", count_then_allocate)
    sender = IpcSender(WeightsSection(), torch.device("cpu"), num_bytes=1 << 16)
    for name in ("first", "second"):
        sender.connect(sender.announce(name, num_senders=1, world_size=1), 0)
    sender.abort()
    assert num_mapped[2:] == num_mapped[:2]


def test_several_senders_are_refused() -> None:
    sender = IpcSender(WeightsSection(), torch.device("cpu"), num_bytes=64)
    with pytest.raises(WeightSyncError, match="but 2 send"):
        sender.announce("two", num_senders=2, world_size=3)


def test_a_late_learner_costs_one_deadline(ends: Ends) -> None:
    with pytest.raises(WeightSyncError, match=r"was not done within 0\.1 s"):
        next(ends.receiver.receive(incoming(deadline_s=0.1)))


def test_a_layout_larger_than_the_buffers_is_refused(ends: Ends) -> None:
    large = (ipc_learner.bucket("large", 1 << 20),)
    with pytest.raises(WeightSyncError, match="does not fit the shared buffers"):
        ends.receiver.prepare(Incoming(large, LONG_S, own_buffers=False))


def test_memory_of_a_learner_is_closed_again_when_joining_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    sender = HandoverSender("members-1")
    where = weights_pb2.Communicator(
        communicator_id="members-1", store_host=str(sender.path)
    )
    errors: list[WeightSyncError] = []

    def accept() -> None:
        try:
            sender.accept([1], ("00", "01"), 64, LONG_S)
        except WeightSyncError as error:
            errors.append(error)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with fake_cupy.installed() as cupy:
        # There is no GPU on which torch could see what was opened.
        with pytest.raises((AssertionError, RuntimeError)):
            IpcReceiver(where, 1, LONG_S, torch.device("cuda", 0))
        # Before the others wait for it.
        assert cupy.seen == ["digest 0 spans", "open", "open"]
        assert not cupy.open_pointers
    accepting.join(LONG_S)
    assert "receiver 1 is gone" in str(errors[0])
    sender.close()


class SlowDigests:
    """Digests of one update; `add` blocks the first bucket until `go_on` is set."""

    def __init__(self) -> None:
        self.came, self.go_on = threading.Event(), threading.Event()

    def add(self, place: int, pointer: int, stream: int) -> None:
        self.came.set()
        assert self.go_on.wait(LONG_S)

    def read(self, stream: int) -> list[list[bytes]]:
        return []


def test_buffers_stay_until_a_thread_that_copies_out_of_them_is_done(ends, monkeypatch):
    receiver = ends.receiver
    digests = SlowDigests()
    monkeypatch.setattr(receiver, "_open_digests", lambda _: digests)
    vars(receiver)["_digests"] = digests
    with ThreadPoolExecutor() as pool:
        staging = pool.submit(
            lambda: list(receiver.receive(incoming(own_buffers=True)))
        )
        sending = ends.send(9)
        assert digests.came.wait(LONG_S)
        closing = pool.submit(receiver.close)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        assert receiver._buffers.arrays
        digests.go_on.set()
        closing.result(LONG_S)
        assert not receiver._buffers.arrays
        for failed in (staging, sending):
            with pytest.raises(WeightSyncError, match="is gone|was left"):
                failed.result(LONG_S)
