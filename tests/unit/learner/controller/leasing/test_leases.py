import dataclasses
import math

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import Failure, FailureKind, ServerId, Status, TrajectoryName
from slipstream.learner.controller.leasing.groups import Fate, fewest_members
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.servers.session import ServerKey
from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.lease_rig import book_of, take_batch

A = ServerKey(ServerId("a"), 1)
B = ServerKey(ServerId("b"), 1)
C = ServerKey(ServerId("c"), 3)


def make_book(**changes) -> LeaseBook:
    return book_of(**{"groups_per_step": 2, "num_steps": 10} | changes)


def reply(
    group, member, *, attempt=0, status=Status.COMPLETED, failure=None, will_retry=False
):
    return plain_trajectory(
        [1, 2, 3],
        (1, 2),
        group_id=group.group_id,
        member=member,
        attempt=attempt,
        server_id=A.server_id,
        environment=group.environment,
        status=status,
        failure=failure,
        will_retry=will_retry,
    )


def lease(book, server=A, version=0):
    return book.lease("e", 0, 0, server, version)


@pytest.fixture
def book():
    return make_book()


@pytest.fixture
def group(book):
    return lease(book)


def test_leases_stop_where_a_group_could_expire(book):
    for _ in range(4):
        assert book.may_lease(0)
        lease(book)
    assert not book.may_lease(0)
    assert book.may_lease(1)


def test_groups_overtake_each_other_while_the_slow_one_can_wait(book):
    slow, *other_groups = [lease(book) for _ in range(3)]
    for group in other_groups:
        for member in range(2):
            book.add(reply(group, member))
    batch = take_batch(book)
    assert batch == other_groups
    assert list(book.groups.values()) == [slow]


def test_the_slow_group_is_waited_for_when_it_is_due():
    book = make_book(max_staleness=0)
    slow = lease(book)
    quick = lease(book)
    for member in range(2):
        book.add(reply(quick, member))
    assert take_batch(book) is None
    assert book.due() == [slow]


def test_a_member_fills_its_place_once(book, group):
    assert book.add(reply(group, 0)) is Fate.HELD
    assert book.add(reply(group, 0, attempt=1)) is Fate.SUPERSEDED
    assert book.add(reply(group, 1)) is Fate.HELD
    assert group.is_complete
    assert book.add(reply(group, 2)) is Fate.SUPERSEDED


def test_a_failed_member_runs_again_until_its_last_attempt(book, group):
    failure = Failure(FailureKind.ENVIRONMENT, "x")
    first = reply(group, 0, status=Status.FAILED, failure=failure, will_retry=True)
    last = reply(group, 0, attempt=1, status=Status.FAILED, failure=failure)
    assert book.add(first) is Fate.RETRIED
    assert book.episodes_by_holder()[A] == 2
    assert book.add(last) is Fate.FAILED
    assert group.next_attempt == 2
    assert book.episodes_by_holder()[A] == 1
    book.remove(group.group_id)
    assert book.episodes_by_holder()[A] == 1


@pytest.mark.parametrize(("size", "fewest"), [(16, 8), (5, 3), (3, 2), (2, 2), (1, 1)])
def test_a_group_needs_half_of_its_members_and_two(size, fewest):
    assert fewest_members(size) == fewest


def test_a_group_goes_on_with_those_that_finish_down_to_half_of_it():
    book = make_book(group_size=4, groups_per_step=1)
    group = lease(book)
    failure = Failure(FailureKind.ENVIRONMENT, "x")
    assert book.add(reply(group, 0)) is Fate.HELD
    for member in (3, 1):
        failed_reply = reply(group, member, status=Status.FAILED, failure=failure)
        assert book.add(failed_reply) is Fate.FAILED
        assert book.give_up(group, [member])
    assert group.missing == [2]
    assert book.episodes_by_holder()[A] == 1
    # A third one would leave a group of one.
    assert not book.give_up(group, [2])
    assert group.missing == [2]
    # A late reply of a member that was given up fills no place.
    assert book.add(reply(group, 1)) is Fate.SUPERSEDED
    assert take_batch(book) is None
    assert book.add(reply(group, 2)) is Fate.HELD
    assert group.is_complete
    assert take_batch(book) == [group]
    assert [t.member for t in group.in_order()] == [0, 2]


@pytest.mark.parametrize(("size", "most"), [(16, 3), (8, 1), (4, 1), (40, 9)])
def test_a_task_of_which_no_member_finishes_is_over_after_a_quarter_of_them(size, most):
    book = make_book(group_size=size)
    group = lease(book)
    given_up = [book.give_up(group, [member]) for member in range(most + 1)]
    assert given_up == [True] * most + [False]
    book.add(reply(group, size - 1))
    assert book.give_up(group, [most])


def test_the_oldest_open_group_is_the_first_leased_of_its_environment_that_waits_for_members():
    book = make_book(max_staleness=8)
    groups = [lease(book) for _ in range(3)]
    book.lease("f", 0, 0, A, 0)
    assert (book.oldest_open("e"), book.oldest_open("f")) == (0, 3)
    for group in groups[:2]:
        book.add(reply(group, 0))
        book.add(reply(group, 1))
    assert book.oldest_open("e") == 2
    book.remove(groups[2].group_id)
    assert book.oldest_open("e") == math.inf


def test_an_orphan_keeps_what_is_back_and_may_go_to_a_server_that_is_new_enough(book):
    group = lease(book, version=1)
    book.add(reply(group, 1))
    assert book.orphan(A) == [group]
    assert book.orphans() == [group]
    assert group.missing == [0]
    assert not book.may_reassign(group, 0)
    assert book.may_reassign(group, 1)
    book.reassign(group, B)
    assert book.held_by(B) == [group]
    assert book.episodes_by_holder()[B] == 1


def test_evaluation_leases_do_not_count_for_the_invariant():
    book = make_book(max_staleness=0)
    for _ in range(10):
        book.lease_episode("e", A, 0, task_index=0)
    assert book.may_lease(0)
    assert book.training_groups() == []


def test_episodes_that_are_not_trained_have_other_names_at_each_start():
    history = RunHistory()
    names = []
    for _ in range(3):
        history.add(kinds.Start(format=1, run_id="r"))
        book = make_book()
        book.restore(history)
        names += [
            book.lease_episode("e", A, 0, task_index=0).group_id for _ in range(2)
        ]
    assert len(set(names)) == 6


def test_a_server_that_closes_a_lease_unfinished_hands_its_group_back(book, group):
    book.add(reply(group, 0))
    book.closed(group.group_id, B, [1])
    assert group.holder == A
    book.closed(group.group_id, A, [1])
    assert book.orphans() == [group]
    assert group.missing == [1]
    assert group.setbacks == {}
    book.reassign(group, B)
    assert (book.orphans(), book.episodes_by_holder()[B]) == ([], 1)
    assert book.add(reply(group, 1)) is Fate.HELD
    assert group.is_complete


def test_a_cancelled_episode_runs_again_when_the_rest_of_its_lease_is_over(book, group):
    book.closed(group.group_id, A, [0])
    assert book.add(reply(group, 0, status=Status.CANCELLED)) is Fate.CANCELLED
    assert book.orphans() == []
    book.add(reply(group, 1))
    assert book.orphans() == [group]


def test_what_a_closed_lease_sent_before_its_report_ends_nothing_in_the_next_one(
    book, group
):
    book.closed(group.group_id, A, [0, 1], next_attempt=1)
    book.reassign(group, A)
    # Attempt 0 again would give two trajectories one name: the second would count as a repeat.
    assert group.next_attempt == 1
    assert book.add(reply(group, 0, status=Status.CANCELLED)) is Fate.CANCELLED
    assert (
        book.quarantined(TrajectoryName(group.group_id, 1, 0, 1), will_retry=False)
        is group
    )
    assert group.running == [0, 1]
    assert book.episodes_by_holder()[A] == 2
    for member in range(2):
        book.add(reply(group, member, attempt=1))
    assert group.is_complete


@pytest.mark.parametrize(
    ("unfinished", "next_attempt", "line"),
    [
        ([], 8, "attempt 7 of g000000, which was leased for attempts 0 to 6"),
        (
            [],
            1_000_000,
            "attempt 999999 of g000000, which was leased for attempts 0 to 6",
        ),
        ([0, 2], 1, "member 2 of g000000, which has 2 members"),
    ],
)
def test_a_report_that_contradicts_its_lease_is_refused(unfinished, next_attempt, line):
    book = make_book()
    group = lease(book)
    with pytest.raises(ProtocolError, match=f"^rollout server a reports {line}$"):
        book.closed(group.group_id, A, unfinished, next_attempt=next_attempt)
    assert (group.closed, group.next_attempt, group.running) == (False, 0, [0, 1])
    # A report of a server that does not hold the lease is ignored.
    book.closed(group.group_id, C, unfinished, next_attempt=next_attempt)
    assert (group.closed, group.next_attempt) == (False, 0)
    book.closed(group.group_id, A, [0, 1], next_attempt=7)
    assert (group.holder, group.next_attempt) == (None, 7)


@pytest.mark.parametrize(("attempt", "epoch"), [(7, 1), (999_999, 1), (0, 5)])
def test_an_attempt_that_no_lease_allows_sets_nobody_back(book, group, attempt, epoch):
    name = TrajectoryName(group.group_id, 1, attempt, epoch)
    assert book.quarantined(name, will_retry=False) is None
    assert (group.setbacks, group.next_attempt, group.running) == ({}, 0, [0, 1])


def test_each_lease_of_a_group_allows_as_many_attempts_again(book, group):
    book.closed(group.group_id, A, [0, 1], next_attempt=3)
    book.reassign(group, A)
    assert [group.excess(1, attempt) == "" for attempt in (0, 9, 10)] == [
        True,
        True,
        False,
    ]


def test_every_lost_server_counts_for_the_members_that_it_ran(book, group):
    book.add(reply(group, 0))
    book.orphan(A)
    book.reassign(group, B)
    book.orphan(B)
    assert group.setbacks == {1: 2}


def test_the_member_of_a_quarantined_trajectory_runs_again(book, group):
    book.add(reply(group, 0))
    name = TrajectoryName(group.group_id, 1, 0, 1)
    assert book.quarantined(name, will_retry=False) is group
    assert (group.setbacks, group.next_attempt, book.episodes_by_holder()[A]) == (
        {1: 1},
        1,
        0,
    )
    assert book.orphans() == []
    book.closed(group.group_id, A, [])
    assert book.orphans() == [group]


def test_what_is_quarantined_for_a_place_that_is_filled_changes_nothing(book, group):
    book.add(reply(group, 0))
    for other in (0, 7):
        name = TrajectoryName(group.group_id, other, 0, 1)
        assert book.quarantined(name, will_retry=False) is None
    assert book.quarantined(TrajectoryName("g9", 0, 0, 1), will_retry=False) is None
    assert group.setbacks == {}


# Holds what A, which is lost, had begun.
NEXT = ServerKey(ServerId("a"), 2)


def leased_again(book):
    group = lease(book)
    book.orphan(A)
    book.reassign(group, NEXT)
    return group


def test_what_a_lost_server_cancelled_or_failed_ends_nothing_on_the_next_one(book):
    group = leased_again(book)
    failure = Failure(FailureKind.TIMEOUT, "slow")
    assert book.add(reply(group, 0, status=Status.CANCELLED)) is Fate.CANCELLED
    assert (
        book.add(reply(group, 1, status=Status.FAILED, failure=failure)) is Fate.RETRIED
    )
    assert (
        book.quarantined(TrajectoryName(group.group_id, 1, 0, 1), will_retry=False)
        is group
    )
    assert book.episodes_by_holder()[NEXT] == 2
    assert group.running == [0, 1]


def test_members_that_a_closed_lease_left_without_a_word_run_again_once_all_sent_has_arrived():
    book = make_book(group_size=3)
    group = lease(book)
    assert book.short_leases(A, 0, 0) == []
    book.closed(group.group_id, A, [2], next_attempt=1)
    # A trajectory that was sent before the close may still be on its way; what is sent later does
    # not matter.
    assert book.short_leases(A, 7, 6) == []
    book.add(reply(group, 0))
    assert book.short_leases(B, 7, 7) == []
    assert book.short_leases(A, 9, 7) == [group]
    assert book.run_again(group) == [1]
    assert group.setbacks == {1: 1}
    assert book.short_leases(A, 9, 9) == []
    assert book.orphans() == [group]
    book.reassign(group, B)
    assert (group.missing, group.first_attempt) == ([1, 2], 1)
    assert book.short_leases(B, 5, 5) == []
    book.closed(group.group_id, B, [])
    assert book.short_leases(B, 5, 5) == [group]


def test_a_member_of_a_withdrawn_lease_keeps_its_slot_until_its_last_attempt_has_ended(
    book, group
):
    book.remove(group.group_id)
    failure = Failure(FailureKind.TIMEOUT, "slow")
    book.add(reply(group, 0, status=Status.FAILED, failure=failure, will_retry=True))
    book.quarantined(TrajectoryName(group.group_id, 1, 0, 1), will_retry=True)
    # Trajectories that a lost server had of the same lease are not this server's.
    book.quarantined(TrajectoryName(group.group_id, 1, 0, 7), will_retry=False)
    assert book.episodes_by_holder()[A] == 2
    book.add(reply(group, 0, attempt=1))
    assert book.episodes_by_holder()[A] == 1
    book.quarantined(TrajectoryName(group.group_id, 1, 1, 1), will_retry=False)
    assert book.closing == {}


def test_a_late_reply_of_a_lost_server_leaves_the_next_one_its_slot_until_it_is_done(
    book,
):
    group = leased_again(book)
    assert book.add(reply(group, 0)) is Fate.HELD
    assert (book.episodes_by_holder()[NEXT], book.promised_episodes) == (2, 2)
    book.remove(group.group_id)
    assert (book.episodes_by_holder()[NEXT], book.promised_episodes) == (2, 2)
    book.closed(group.group_id, NEXT, [0, 1])
    assert (book.episodes_by_holder()[NEXT], book.promised_episodes) == (0, 0)


def test_a_member_that_is_given_up_keeps_its_slot_until_its_server_has_ended_it():
    book = make_book(group_size=3)
    group = lease(book)
    book.add(reply(group, 0))
    book.add(reply(group, 1))
    assert book.give_up(group, [2])
    assert group.is_complete
    assert book.episodes_by_holder()[A] == 1
    book.closed(group.group_id, A, [2], next_attempt=1)
    assert book.episodes_by_holder()[A] == 0
    assert book.orphans() == []


def test_the_last_step_bounds_what_is_leased():
    book = make_book(num_steps=1)
    lease(book)
    lease(book)
    assert not book.may_lease(0)


def test_a_lease_that_is_taken_back_keeps_slots_and_bytes_until_its_server_has_closed_it(
    book, group
):
    book.add(reply(group, 0))
    assert (book.episodes_by_holder()[A], book.promised_episodes) == (1, 1)
    book.remove(group.group_id)
    assert (book.episodes_by_holder()[A], book.promised_episodes) == (1, 1)
    assert book.episodes_by_environment() == {"e": 1}
    book.closed(group.group_id, B, [])
    assert book.episodes_by_holder()[A] == 1
    book.closed(group.group_id, A, [])
    assert (book.episodes_by_holder()[A], book.promised_episodes) == (0, 0)


def test_a_lost_server_closes_what_it_was_ending(book):
    book.remove(lease(book).group_id)
    book.remove(lease(book, server=B).group_id)
    book.orphan(A)
    assert (book.episodes_by_holder()[A], book.episodes_by_holder()[B]) == (0, 2)


def test_an_orphan_keeps_the_bytes_that_its_next_server_will_need(book, group):
    book.orphan(A)
    assert (book.episodes_by_holder()[A], book.promised_episodes) == (0, 2)
    book.reassign(group, B)
    assert (book.episodes_by_holder()[B], book.promised_episodes) == (2, 2)


def test_a_quarantined_attempt_that_its_server_repeats_is_waited_for(book, group):
    name = TrajectoryName(group.group_id, 1, 0, 1)
    assert book.quarantined(name, will_retry=True) is group
    assert book.episodes_by_holder()[A] == 2


def test_a_closed_lease_whose_members_all_arrive_is_never_short():
    book = make_book(group_size=2)
    group = lease(book)
    book.closed(group.group_id, A, [], next_attempt=1)
    assert book.short_leases(A, 2, 0) == []
    for member in range(2):
        book.add(reply(group, member))
    assert book.short_leases(A, 2, 2) == []
    assert (group.is_complete, group.holder, book.orphans()) == (True, A, [])


def judged_reply(group, member, *, attempt=0, epoch=1, judged_lease=1):
    trajectory = reply(group, member, attempt=attempt)
    return dataclasses.replace(
        trajectory, server_epoch=epoch, judged_lease=judged_lease
    )


def test_members_that_were_compared_in_different_leases_are_never_in_one_group(
    book, group
):
    book.orphan(A)
    book.reassign(group, C)
    # Late, of the first lease.
    assert book.add(judged_reply(group, 0)) is Fate.SUPERSEDED
    of_second_lease = {"attempt": 1, "epoch": C.epoch, "judged_lease": 2}
    assert book.add(judged_reply(group, 1, **of_second_lease)) is Fate.HELD
    assert book.add(judged_reply(group, 0)) is Fate.SUPERSEDED
    assert book.add(judged_reply(group, 0, **of_second_lease)) is Fate.HELD
    assert group.is_complete


def test_a_group_without_a_holder_takes_members_of_the_first_lease_that_arrives(
    book, group
):
    book.orphan(A)
    of_second_lease = {"attempt": 1, "epoch": C.epoch, "judged_lease": 2}
    assert book.add(judged_reply(group, 0, **of_second_lease)) is Fate.HELD
    assert book.add(judged_reply(group, 1)) is Fate.SUPERSEDED
    assert book.torn() == [group]


def test_only_an_orphan_whose_members_were_compared_is_torn(book, group):
    plain_group = lease(book)
    book.add(judged_reply(group, 0))
    book.add(reply(plain_group, 0))
    assert book.torn() == []
    book.orphan(A)
    assert book.torn() == [group]
