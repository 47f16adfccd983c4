from __future__ import annotations

from slipstream.core.types import GroupId, Purpose, ServerId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.watch import CANCEL_LIMIT_S, LeaseWatch

A, B = ServerKey(ServerId("a"), 1), ServerKey(ServerId("b"), 1)


def group(name: str, holder: ServerKey | None = A) -> Group:
    return Group(
        group_id=GroupId(name),
        environment="e",
        task_index=0,
        seed=0,
        purpose=Purpose.TRAINING,
        size=2,
        deadline_step=1,
        holder=holder,
    )


def late(watch: LeaseWatch, groups: list[Group], **served_s: float) -> list[str]:
    clocks = {ServerKey(ServerId(name), 1): time_s for name, time_s in served_s.items()}
    return [group.group_id for group in watch.overdue(groups, clocks).groups]


def test_a_lease_is_overdue_once_when_its_server_served_for_so_long_without_an_end() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    assert late(watch, [slow], a=100.0) == []
    assert late(watch, [slow], a=110.0) == []
    assert late(watch, [slow], a=110.1) == ["slow"]
    assert late(watch, [slow], a=125.0) == []


def test_time_in_which_the_server_does_not_serve_is_nobodys_delay() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    # However long the wall clock runs, the server's own clock stands still.
    for _ in range(5):
        assert late(watch, [slow], a=100.0) == []


def test_an_attempt_that_ended_is_progress_whatever_came_of_it() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    assert late(watch, [slow], a=0.0) == []
    slow.attempts[1] = 0
    assert late(watch, [slow], a=9.0) == []
    assert late(watch, [slow], a=18.0) == []
    slow.attempts[1] = 1
    assert late(watch, [slow], a=20.0) == []
    assert late(watch, [slow], a=30.1) == ["slow"]


def test_another_holder_has_its_own_time() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    assert late(watch, [slow], a=0.0, b=50.0) == []
    assert late(watch, [slow], a=10.1, b=50.0) == ["slow"]
    slow.holder = None
    assert late(watch, [slow], a=30.0, b=50.0) == []
    slow.holder, slow.num_leases = B, 2
    assert late(watch, [slow], a=30.0, b=50.0) == []
    assert late(watch, [slow], a=90.0, b=60.0) == []
    assert late(watch, [slow], a=90.0, b=60.1) == ["slow"]


def test_what_is_complete_or_handed_back_is_not_waited_for() -> None:
    watch, done = LeaseWatch(10.0), group("done")
    late(watch, [done], a=0.0)
    done.ended.update((0, 1))
    assert late(watch, [done], a=50.0) == []


def test_a_server_that_does_not_end_what_was_taken_back_is_told() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    late(watch, [slow], a=0.0)
    assert late(watch, [slow], a=11.0) == ["slow"]
    assert watch.overdue([slow], {A: 11.0 + CANCEL_LIMIT_S}).servers == ()
    assert watch.overdue([slow], {A: 11.1 + CANCEL_LIMIT_S}).servers == (A,)


def test_a_lease_that_was_taken_back_and_given_to_the_same_server_is_a_new_one() -> None:
    watch, slow = LeaseWatch(10.0), group("slow")
    late(watch, [slow], a=0.0)
    assert late(watch, [slow], a=11.0) == ["slow"]
    # The server's cancelled episodes come back: still the same lease.
    slow.attempts[0] = 0
    assert late(watch, [slow], a=12.0) == []
    assert late(watch, [slow], a=30.0) == []
    slow.num_leases = 2
    assert late(watch, [slow], a=31.0) == []
    assert late(watch, [slow], a=41.1) == ["slow"]
