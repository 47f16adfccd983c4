"""NCCL through cupy, with a cupy that is not there."""

import ctypes
import threading
import time

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.nccl_group import CupyNccl, NcclGroup, Wire
from support.fakes import fake_cupy
from support.fakes.fake_nccl import FakeCommunicator, FakeNccl, Meeting
from support.rigs.waiting import wait_until


def test_communicator_whose_warm_up_fails_is_aborted_before_it_is_finalised() -> None:
    with fake_cupy.installed() as cupy:
        cupy.broadcast_error = fake_cupy.NcclError("unhandled system error")
        with pytest.raises(WeightSyncError, match="unhandled system error"):
            NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=30.0)
        assert [each.num_aborts for each in cupy.communicators] == [1]


def test_communicator_whose_warm_up_never_ends_is_aborted() -> None:
    with fake_cupy.installed() as cupy:
        cupy.ends = False
        with pytest.raises(WeightSyncError, match="did not meet|was lost when all had met"):
            NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=0.2)
        assert [each.num_aborts for each in cupy.communicators] == [1]


# Without the watchdog some tests would wait for ever.
pytestmark = pytest.mark.timeout(60)
LONG_S = 30.0
# A joining member and the watchdog have the same deadline; either may raise first.
LOST = "did not meet|was lost when all had met"
MEMBER_1 = {"rank": 1, "world_size": 2}


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))


class Refusing(FakeNccl):
    """Makes communicators and takes no broadcast."""

    def connect(self, unique_id: bytes, *, rank: int, world_size: int) -> FakeCommunicator:
        made = super().connect(unique_id, rank=rank, world_size=world_size)

        def broadcast(*_: object) -> None:
            raise WeightSyncError("refused")

        made.broadcast = broadcast
        return made


def join_all(num_members: int) -> tuple[list[NcclGroup], list[FakeCommunicator]]:
    meetings: dict[bytes, Meeting] = {}
    backends = [FakeNccl(meetings) for _ in range(num_members)]
    groups: dict[int, NcclGroup] = {}

    def join(rank: int) -> None:
        groups[rank] = NcclGroup.join(
            backends[rank], b"id", rank=rank, world_size=num_members, deadline_s=LONG_S
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return [groups[rank] for rank in range(num_members)], [b.made[0] for b in backends]


def test_broadcasts_of_several_roots_arrive_in_order() -> None:
    groups, _ = join_all(3)
    contents = [b"from 1", b"from 0 ", b"from 1 again"]
    buffers = [
        [
            buffer(data if rank == root else bytes(len(data)))
            for data, root in zip(contents, (1, 0, 1), strict=True)
        ]
        for rank in range(3)
    ]
    for group, mine in zip(groups, buffers, strict=True):
        for memory, root in zip(mine, (1, 0, 1), strict=True):
            group.broadcast(ctypes.addressof(memory), len(memory), root, 7, deadline_s=LONG_S)
    for group, mine in zip(groups, buffers, strict=True):
        group.wait()
        assert [memory.raw for memory in mine] == contents
        wire = group.take_wire()
        assert wire.seconds > 0
        assert wire.num_bytes == sum(map(len, contents))
        assert group.take_wire() == Wire()
        group.abort()


def test_member_that_is_missing_costs_the_join_deadline() -> None:
    with pytest.raises(WeightSyncError, match=r"2 members .* did not meet within 0\.2 s"):
        NcclGroup.join(FakeNccl({}), b"id", rank=0, world_size=2, deadline_s=0.2)


def test_join_that_is_given_up_ends_before_its_deadline() -> None:
    abandoned, meetings = threading.Event(), dict[bytes, Meeting]()
    abandoned.set()
    early, late = FakeNccl(meetings), FakeNccl(meetings)
    with pytest.raises(WeightSyncError, match="did not meet before one of them was lost"):
        NcclGroup.join(early, b"id", rank=0, world_size=2, deadline_s=LONG_S, abandoned=abandoned)
    late.connect(b"id", rank=1, world_size=2)
    wait_until(lambda: early.made and early.made[0].num_aborts == 1)


def test_communicator_that_comes_about_too_late_is_aborted() -> None:
    meetings: dict[bytes, Meeting] = {}
    early, late = FakeNccl(meetings), FakeNccl(meetings)
    with pytest.raises(WeightSyncError, match="did not meet"):
        NcclGroup.join(early, b"id", rank=0, world_size=2, deadline_s=0.1)
    late.connect(b"id", rank=1, world_size=2)
    wait_until(lambda: early.made and early.made[0].num_aborts == 1)


def test_member_that_dies_between_the_meeting_and_the_first_broadcast_costs_the_deadline() -> None:
    meetings: dict[bytes, Meeting] = {}
    backend, dead = FakeNccl(meetings), FakeNccl(meetings)
    joining = threading.Thread(target=dead.connect, args=(b"id",), kwargs=MEMBER_1)
    joining.start()
    wait_until(lambda: b"id" in meetings and meetings[b"id"].members == {1})
    with pytest.raises(WeightSyncError, match=LOST):
        NcclGroup.join(backend, b"id", rank=0, world_size=2, deadline_s=0.3)
    joining.join()
    # The communicator is aborted: its kernel would wait on the device for ever.
    assert [communicator.num_aborts for communicator in backend.made] == [1]


def test_first_broadcast_that_nccl_refuses_aborts_the_communicator() -> None:
    backend = Refusing({})
    with pytest.raises(WeightSyncError, match="refused"):
        NcclGroup.join(backend, b"id", rank=0, world_size=1, deadline_s=LONG_S)
    assert backend.made[0].num_aborts == 1


def test_abort_that_does_not_come_back_holds_nobody() -> None:
    (group, _), (communicator, _) = join_all(2)
    communicator.abort_gate.clear()
    memory = buffer(b"data")
    group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=0.1)
    with pytest.raises(WeightSyncError, match="not done within"):
        group.wait()
    group.abort(limit_s=0.1)
    assert communicator.num_aborts == 1
    communicator.abort_gate.set()


def test_communicator_is_not_freed_under_a_call_that_is_about_to_enter_it() -> None:
    (group, _), (communicator, _) = join_all(2)
    entering, seen = threading.Event(), list[int]()

    def slow(*_: object) -> None:
        entering.set()
        time.sleep(0.05)
        seen.append(communicator.num_aborts)

    communicator.broadcast = slow
    memory = buffer(b"data")
    aborting = threading.Thread(target=lambda: entering.wait(LONG_S) and group.abort())
    aborting.start()
    with pytest.raises(WeightSyncError, match="it was aborted"):
        group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=LONG_S)
    aborting.join()
    assert seen == [0]
    assert communicator.num_aborts == 1


def test_what_nccl_refuses_is_an_error_at_once() -> None:
    meetings = {b"id": Meeting(3)}
    with pytest.raises(WeightSyncError, match="disagree"):
        NcclGroup.join(FakeNccl(meetings), b"id", rank=0, world_size=2, deadline_s=LONG_S)


def test_broadcast_that_nobody_else_joins_is_aborted_after_its_deadline() -> None:
    (group, _), (communicator, _) = join_all(2)
    memory = buffer(b"data")
    group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=0.1)
    with pytest.raises(WeightSyncError, match=r"4 bytes from rank 0 was not done within 0\.1 s"):
        group.wait()
    assert group.is_aborted
    wait_until(lambda: communicator.num_aborts == 1)
    with pytest.raises(WeightSyncError, match="communicator is gone"):
        group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=0.1)
    group.abort()
    assert communicator.num_aborts == 1


def test_watchdog_aborts_also_when_nobody_waits() -> None:
    (group, _), (communicator, _) = join_all(2)
    memory = buffer(b"data")
    group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=0.1)
    wait_until(lambda: communicator.num_aborts == 1)


def test_call_that_does_not_come_back_is_released() -> None:
    (group, _), (communicator, _) = join_all(2)
    memory = buffer(b"data")
    communicator.gate.clear()
    with pytest.raises(WeightSyncError, match="unhandled system error"):
        group.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=0.1)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says, which stands still unless a test changes it."""
    found = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def test_deadline_is_of_each_broadcast_and_not_of_all_that_wait(now_s: list[float]) -> None:
    (sender, receiver), _ = join_all(2)
    memory, there = buffer(b"data"), buffer(b"    ")
    for _ in range(6):
        sender.broadcast(ctypes.addressof(memory), 4, 0, 0, deadline_s=2.0)
    for left in reversed(range(6)):
        now_s[0] += 1.5
        receiver.broadcast(ctypes.addressof(there), 4, 0, 0, deadline_s=LONG_S)
        # The watchdog has seen its end.
        wait_until(lambda left=left: len(sender._pending) == left)
    sender.wait()
    assert there.raw == b"data"
    sender.abort()
    receiver.abort()


def test_idle_group_is_left_alone(now_s: list[float]) -> None:
    groups, communicators = join_all(2)
    memory = [buffer(b"data"), buffer(b"    ")]
    for _ in range(2):
        for group, mine in zip(groups, memory, strict=True):
            group.broadcast(ctypes.addressof(mine), 4, 0, 0, deadline_s=1.0)
        for group in groups:
            group.wait()
        now_s[0] += 100.0
    assert [communicator.num_aborts for communicator in communicators] == [0, 0]
    for group in groups:
        group.abort()
