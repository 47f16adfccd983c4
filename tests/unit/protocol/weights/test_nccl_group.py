"""NCCL through cupy, with a cupy that is not there."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.nccl_group import NcclGroup, Wire
from support.fakes import fake_cupy, fake_nccl
from support.fakes.fake_nccl import FakeNccl, Member
from support.rigs.waiting import wait_until

# Without the watchdog some tests would wait for ever.
pytestmark = pytest.mark.timeout(60)
LONG_S = 30.0
# A joining member and the watchdog have the same deadline; either may raise first.
LOST = "did not meet|was lost when all had met"
JOINED: list[NcclGroup] = []


@pytest.fixture(autouse=True)
def nccl() -> Iterator[FakeNccl]:
    with fake_nccl.installed() as nccl:
        yield nccl
        # The groups' watchdogs end before the fake goes.
        while JOINED:
            JOINED.pop().abort()


def buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))


def join(
    rank: int = 0, deadline_s: float = LONG_S, world_size: int = 2, **named
) -> NcclGroup:
    limit = {"deadline_s": deadline_s, **named}
    group = NcclGroup.join(0, b"id", rank=rank, world_size=world_size, **limit)
    JOINED.append(group)
    return group


def broadcast(
    group: NcclGroup, memory, root: int = 0, deadline_s: float = LONG_S
) -> None:
    address = ctypes.addressof(memory)
    size = len(memory)
    group.broadcast(address, size, root, 7, deadline_s=deadline_s)


def join_all(
    nccl: FakeNccl, num_members: int = 2
) -> tuple[list[NcclGroup], list[Member]]:
    groups: dict[int, NcclGroup] = {}

    def join_one(rank: int) -> None:
        groups[rank] = join(rank, world_size=num_members)

    threads = [
        threading.Thread(target=join_one, args=(rank,)) for rank in range(num_members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    members = sorted(nccl.members, key=lambda member: member.rank)
    return [groups[rank] for rank in range(num_members)], members


def test_broadcasts_of_several_roots_arrive_in_order(nccl: FakeNccl) -> None:
    groups, _ = join_all(nccl, 3)
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
            broadcast(group, memory, root)
    for group, mine in zip(groups, buffers, strict=True):
        group.wait()
        assert [memory.raw for memory in mine] == contents
        wire = group.take_wire()
        assert wire.seconds > 0
        assert wire.num_bytes == sum(map(len, contents))
        assert group.take_wire() == Wire()


def test_member_that_is_missing_costs_the_join_deadline() -> None:
    with pytest.raises(
        WeightSyncError, match=r"2 members .* did not meet within 0\.2 s"
    ):
        join(deadline_s=0.2)


@pytest.mark.parametrize("is_given_up", [True, False])
def test_communicator_that_comes_about_too_late_is_aborted(
    nccl: FakeNccl, is_given_up
) -> None:
    abandoned = threading.Event()
    if is_given_up:
        abandoned.set()
    message = "before one of them was lost" if is_given_up else r"within 0\.1 s"
    with pytest.raises(WeightSyncError, match=f"did not meet {message}"):
        # A join that is given up must not wait for its deadline, which is beyond this test's limit.
        join(deadline_s=3600.0 if is_given_up else 0.1, abandoned=abandoned)
    nccl.connect(b"id", 1)
    wait_until(lambda: [m.num_aborts for m in nccl.members if m.rank == 0] == [1])


def test_member_that_dies_between_the_meeting_and_the_first_broadcast_costs_the_deadline(
    nccl,
):
    dead = threading.Thread(target=nccl.connect, args=(b"id", 1))
    dead.start()
    wait_until(lambda: b"id" in nccl.meetings and nccl.meetings[b"id"].members == {1})
    with pytest.raises(WeightSyncError, match=LOST):
        join(deadline_s=0.3)
    dead.join()
    # The communicator is aborted: its kernel would wait on the device for ever.
    assert [member.num_aborts for member in nccl.members if member.rank == 0] == [1]


def test_what_nccl_refuses_is_an_error_at_once(nccl: FakeNccl) -> None:
    nccl.broadcast_error = fake_cupy.NcclError("unhandled system error")
    with pytest.raises(
        WeightSyncError, match="when all had met: .* unhandled system error"
    ):
        join(world_size=1)
    assert nccl.members[0].num_aborts == 1
    nccl.refused = {0}
    with pytest.raises(WeightSyncError, match="no communicator of 2 members: refused"):
        join()


def test_abort_that_does_not_come_back_holds_nobody(nccl: FakeNccl) -> None:
    (group, _), (member, _) = join_all(nccl)
    member.abort_gate.clear()
    memory = buffer(b"data")
    broadcast(group, memory, deadline_s=0.1)
    with pytest.raises(WeightSyncError, match="not done within"):
        group.wait()
    group.abort(limit_s=0.1)
    assert member.num_aborts == 1
    member.abort_gate.set()


def test_communicator_is_not_freed_under_a_call_that_is_about_to_enter_it(
    nccl: FakeNccl,
) -> None:
    (group, _), (member, _) = join_all(nccl)
    entering = threading.Event()
    seen = list[int]()

    def slow(*_: object) -> None:
        entering.set()
        time.sleep(0.05)
        seen.append(member.num_aborts)

    member.broadcast = slow
    aborting = threading.Thread(target=lambda: entering.wait(LONG_S) and group.abort())
    aborting.start()
    with pytest.raises(WeightSyncError, match="it was aborted"):
        broadcast(group, buffer(b"data"))
    aborting.join()
    assert seen == [0]
    assert member.num_aborts == 1


def test_broadcast_that_nobody_else_joins_is_aborted_after_its_deadline(
    nccl: FakeNccl,
) -> None:
    (group, _), (member, _) = join_all(nccl)
    memory = buffer(b"data")
    broadcast(group, memory, deadline_s=0.1)
    # The watchdog aborts also when nobody waits.
    wait_until(lambda: member.num_aborts == 1)
    with pytest.raises(
        WeightSyncError, match=r"4 bytes from rank 0 was not done within 0\.1 s"
    ):
        group.wait()
    assert group.is_aborted
    with pytest.raises(WeightSyncError, match="communicator is gone"):
        broadcast(group, memory)
    group.abort()
    assert member.num_aborts == 1


def test_call_that_does_not_come_back_is_released(nccl: FakeNccl) -> None:
    (group, _), (member, _) = join_all(nccl)
    member.gate.clear()
    with pytest.raises(WeightSyncError, match="unhandled system error"):
        broadcast(group, buffer(b"data"), deadline_s=0.1)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says, which stands still unless a test changes it."""
    found = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def test_deadline_is_of_each_broadcast_and_not_of_all_that_wait(
    nccl, now_s: list[float]
) -> None:
    (sender, receiver), _ = join_all(nccl)
    memory = buffer(b"data")
    there = buffer(b"    ")
    for _ in range(6):
        broadcast(sender, memory, deadline_s=2.0)
    for num_left in reversed(range(6)):
        now_s[0] += 1.5
        broadcast(receiver, there)
        # The watchdog has seen its end.
        wait_until(lambda left=num_left: len(sender._pending) == left)
    sender.wait()
    assert there.raw == b"data"


def test_idle_group_is_left_alone(nccl: FakeNccl, now_s: list[float]) -> None:
    groups, members = join_all(nccl)
    memory = [buffer(b"data"), buffer(b"    ")]
    for _ in range(2):
        for group, mine in zip(groups, memory, strict=True):
            broadcast(group, mine, deadline_s=1.0)
        for group in groups:
            group.wait()
        now_s[0] += 100.0
    assert [member.num_aborts for member in members] == [0, 0]
