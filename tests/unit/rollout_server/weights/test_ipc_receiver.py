"""Weights from the learner's shared buffers, with the learner in a process of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.ipc_sender import IpcSender
from slipstream.protocol.weights.digests import HostDigests, bucket_digest
from slipstream.protocol.weights.handover import HandoverSender, Offer
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.rollout_server.weights.receivers import IpcReceiver
from slipstream.v1 import weights_pb2
from support.fakes import fake_cupy
from support.ranks import ipc_learner

BUCKETS = ipc_learner.BUCKETS
LONG_S = 30.0


class Learner:
    """The sender's process: one line in, one line out."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, ipc_learner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.line()

    def announce(self, name: str, workers: int = 1) -> weights_pb2.Communicator:
        values = json.loads(self.ask(f"announce {name} {workers}"))
        return weights_pb2.Communicator(transport="ipc", **values)


@pytest.fixture(scope="module")
def process() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.process.kill()
    learner.process.communicate(timeout=20)


@pytest.fixture
def learner(process: Learner) -> Learner:
    return process


def joined(learner: Learner, name: str, workers: int = 1) -> list[IpcReceiver]:
    """Every worker's end of a new communicator."""
    where = learner.announce(name, workers)
    learner.tell("connect")
    found: dict[int, IpcReceiver] = {}

    def join(rank: int) -> None:
        found[rank] = IpcReceiver(Seat(where, rank, LONG_S), torch.device("cpu"))

    threads = [threading.Thread(target=join, args=(1 + n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert learner.line() == "connected"
    return [found[rank] for rank in sorted(found)]


def incoming(*, own_buffers: bool = False, deadline_s: float = LONG_S) -> Incoming:
    return Incoming(BUCKETS, deadline_s, own_buffers)


def expected(seed: int) -> list[torch.Tensor]:
    return [ipc_learner.content(seed, place) for place in range(len(BUCKETS))]


def digests_of(tensors: list[torch.Tensor]) -> list[bytes]:
    digests = HostDigests(BUCKETS)
    for place, tensor in enumerate(tensors):
        digests.add(place, tensor.data_ptr())
    return [bucket_digest(each) for each in digests.read()]


@pytest.mark.process
def test_every_bucket_is_read_where_the_learner_put_it(learner: Learner) -> None:
    (transport,) = joined(learner, "one")
    memory = transport.prepare(incoming())
    for seed in (1, 2, 3):
        learner.tell(f"send {seed}")
        got = []
        for place, data in enumerate(transport.receive(incoming())):
            assert data.data_ptr() == memory[place].data_ptr()
            got.append(data.clone())
        assert learner.line() == "sent"
        assert all(torch.equal(a, b) for a, b in zip(got, expected(seed), strict=True))
        assert transport.digests() == digests_of(expected(seed))
    transport.close()


@pytest.mark.process
def test_own_buffers_stay_when_the_learner_goes_on(learner: Learner) -> None:
    (transport,) = joined(learner, "own")
    learner.tell("send 4")
    got = list(transport.receive(incoming(own_buffers=True)))
    assert learner.line() == "sent"
    learner.tell("send 5")
    later = list(transport.receive(incoming(own_buffers=True)))
    assert learner.line() == "sent"
    assert all(torch.equal(a, b) for a, b in zip(got, expected(4), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(later, expected(5), strict=True))
    transport.close()


@pytest.mark.process
def test_all_workers_have_read_a_bucket_before_its_buffer_is_filled_again(learner: Learner) -> None:
    quick, late = joined(learner, "two", workers=2)
    learner.tell("send 6")
    late_buckets = late.receive(incoming())
    got = [next(late_buckets).clone()]
    third = threading.Event()
    quick_got = []

    def hurry() -> None:
        for data in quick.receive(incoming()):
            quick_got.append(data.clone())
            if len(quick_got) == 3:
                third.set()

    thread = threading.Thread(target=hurry)
    thread.start()
    # The third bucket needs the first buffer, which the late receiver still reads.
    assert not third.wait(0.3)
    got += [data.clone() for data in late_buckets]
    thread.join(LONG_S)
    assert learner.line() == "sent"
    for each in (got, quick_got):
        assert all(torch.equal(a, b) for a, b in zip(each, expected(6), strict=True))
    quick.close()
    late.close()


@pytest.mark.process
def test_a_worker_that_leaves_breaks_the_communicator_and_a_new_one_works(learner: Learner) -> None:
    stays, leaves = joined(learner, "broken", workers=2)
    leaves.close()
    learner.tell("send 7")
    buckets = stays.receive(incoming())
    with pytest.raises(WeightSyncError, match="the sender of broken is gone"):
        list(buckets)
    assert "receiver 2 is gone" in learner.line()
    assert "there is no communicator" in learner.ask("send 7")
    stays.close()
    (transport,) = joined(learner, "whole")
    learner.tell("send 8")
    assert len(list(transport.receive(incoming()))) == len(BUCKETS)
    assert learner.line() == "sent"
    transport.close()


def test_buffers_are_not_left_behind_when_nobody_comes() -> None:
    weights = WeightsSection().model_copy(update={"join_deadline_s": 0.2})
    sender = IpcSender(weights, torch.device("cpu"), num_bytes=64)
    where = sender.announce("nobody", num_senders=1, world_size=2)
    with pytest.raises(WeightSyncError, match=r"receivers 1 of nobody did not join within"):
        sender.connect(where, 0)
    assert sender.communicator_id is None
    assert sender._shared is not None
    assert not any(Path("/dev/shm", name).exists() for name in sender._shared.handles)


def test_a_new_communicator_needs_room_for_its_own_buffers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.process
def test_a_late_learner_costs_one_deadline(learner: Learner) -> None:
    (transport,) = joined(learner, "late")
    with pytest.raises(WeightSyncError, match=r"was not done within 0\.1 s"):
        next(transport.receive(incoming(deadline_s=0.1)))
    transport.close()


@pytest.mark.process
def test_a_layout_larger_than_the_buffers_is_refused(learner: Learner) -> None:
    (transport,) = joined(learner, "small")
    large = (ipc_learner.bucket("large", 1 << 20),)
    with pytest.raises(WeightSyncError, match="does not fit the shared buffers"):
        transport.prepare(Incoming(large, LONG_S, own_buffers=False))
    transport.close()


@pytest.mark.process
def test_a_learner_that_dies_is_noticed_at_once() -> None:
    learner = Learner()
    (transport,) = joined(learner, "dies")
    learner.process.kill()
    learner.process.communicate(timeout=20)
    with pytest.raises(WeightSyncError, match="the sender of dies is gone"):
        next(transport.receive(incoming()))
    transport.close()


def test_memory_of_a_learner_is_closed_again_when_joining_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    sender = HandoverSender("127.0.0.1", "members-1")
    where = weights_pb2.Communicator(
        communicator_id="members-1", store_host="127.0.0.1", store_port=sender.port
    )
    errors: list[WeightSyncError] = []

    def accept() -> None:
        try:
            sender.accept([1], Offer(("00", "01"), 64), LONG_S)
        except WeightSyncError as error:
            errors.append(error)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with fake_cupy.installed() as cupy:
        # There is no GPU on which torch could see what was opened.
        with pytest.raises((AssertionError, RuntimeError)):
            IpcReceiver(Seat(where, 1, LONG_S), torch.device("cuda", 0))
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


@pytest.mark.process
def test_buffers_stay_until_a_thread_that_copies_out_of_them_is_done(learner: Learner) -> None:
    (transport,) = joined(learner, "staged")
    transport.prepare(incoming(own_buffers=True))
    digests = SlowDigests()
    transport._digests = digests
    failures: list[WeightSyncError] = []

    def stage() -> None:
        try:
            list(transport.receive(incoming(own_buffers=True)))
        except WeightSyncError as error:
            failures.append(error)

    staging = threading.Thread(target=stage)
    staging.start()
    learner.tell("send 9")
    assert digests.came.wait(LONG_S)
    closing = threading.Thread(target=transport.close)
    closing.start()
    closing.join(0.2)
    assert transport._buffers.arrays
    digests.go_on.set()
    for thread in (staging, closing):
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert not transport._buffers.arrays
    assert len(failures) == 1
    assert "is gone" in learner.line()
