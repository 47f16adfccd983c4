"""The staleness promise: never broken, never stuck, whatever the servers do."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.staleness import (
    choose_batch,
    deadline,
    due_groups,
    holds,
)
from support.references.plain_staleness import PlainGroup, must_start_afresh

sizes = st.integers(1, 4)
deadlines = st.lists(st.integers(0, 12), max_size=12)
groups = st.lists(st.tuples(st.integers(3, 9), st.booleans()), max_size=12).map(
    lambda pairs: [
        PlainGroup(str(index), deadline_step, complete)
        for index, (deadline_step, complete) in enumerate(pairs)
    ]
)

# Expired groups are overlooked when the invariant starts at d = step instead of d = step - 1.
Invariant = Callable[[Counter[int], int, int], bool]


def holds_from_step(leased: Counter[int], step: int, groups_per_step: int) -> bool:
    return holds({d: n for d, n in leased.items() if d >= step}, step, groups_per_step)


@given(deadlines, st.integers(0, 12), sizes)
def test_the_invariant_is_what_its_definition_says(leased, step, groups_per_step):
    by_definition = all(
        sum(deadline <= d for deadline in leased) <= (d - step + 1) * groups_per_step
        for d in range(-1, 30)
        if d >= step - 1
    )
    # A deadline below step - 1 is counted at step - 1.
    assert holds(Counter(leased), step, groups_per_step) == by_definition


@given(groups, st.integers(3, 4), sizes)
def test_a_batch_can_be_formed_as_soon_as_the_due_groups_are_complete(
    leased: list[PlainGroup], step: int, groups_per_step: int
) -> None:
    due = due_groups(leased, step, groups_per_step)
    assert not any(group.is_complete for group in due)
    if not holds(
        Counter(group.deadline_step for group in leased), step, groups_per_step
    ):
        return
    done = [
        PlainGroup(
            group.group_id, group.deadline_step, group.is_complete or group in due
        )
        for group in leased
    ]
    if sum(group.is_complete for group in done) >= groups_per_step:
        assert choose_batch(done, step, groups_per_step) is not None


def test_the_deadline_is_the_served_version_and_the_bound_but_not_after_the_last_step() -> (
    None
):
    assert deadline(5, 2, 100) == 7
    assert deadline(5, 0, 100) == 5
    assert deadline(98, 4, 100) == 99


def test_due_groups_go_before_groups_that_finished_earlier() -> None:
    leased = [
        PlainGroup("young", 5, True),
        PlainGroup("old", 3, False),
        PlainGroup("middle", 4, True),
    ]
    assert choose_batch(leased, 3, 1) is None
    assert [group.group_id for group in due_groups(leased, 3, 1)] == ["old"]
    leased[1] = PlainGroup("old", 3, True)
    assert [group.group_id for group in choose_batch(leased, 3, 1) or []] == ["old"]
    assert [group.group_id for group in choose_batch(leased, 3, 2) or []] == [
        "old",
        "middle",
    ]


def test_an_interrupted_group_starts_afresh_only_when_a_batch_waits_and_nobody_may_finish_it():
    group = PlainGroup("g", 2, False)
    other = PlainGroup("other", 2, False)
    both = [other, group]
    assert must_start_afresh(group, both, 1, 1, [False])
    # The first of two with one step to go can be left for the last one.
    assert not must_start_afresh(other, both, 1, 1, [False])
    assert not must_start_afresh(group, both, 1, 2, [False])
    assert not must_start_afresh(group, both, 1, 1, [False, True])
    assert not must_start_afresh(group, both, 1, 1, [])


def explore(groups_per_step, max_staleness, num_steps, invariant, room=None):
    """Goes through all that two lagging servers and a controller can do; the verdict and states.

    `room`: groups that the queue holds; None: as many as the promise could ever allow and one more.
    Servers whose versions are exchanged are in the same state: the older version stands first.
    """
    places = groups_per_step * (max_staleness + 1) + 1 if room is None else room
    start = (0, (0, 0), ())
    seen = {start}
    todo = [start]
    while todo:
        step, served, leased = todo.pop()
        if any(d < step for d, _ in leased):
            return "expired", len(seen)
        if step == num_steps:
            continue
        following = []
        given_up = []
        for server, version in product(range(2), range(step + 1)):
            if version > served[server]:
                newer = tuple(sorted((version, served[1 - server])))
                following.append((step, newer, leased))
        if len(leased) < places:
            for version in set(served):
                last = deadline(version, max_staleness, num_steps)
                if invariant(
                    Counter([*(d for d, _ in leased), last]), step, groups_per_step
                ):
                    following.append(
                        (step, served, tuple(sorted((*leased, (last, False)))))
                    )
        for index, (d, complete) in enumerate(leased):
            if index and leased[index - 1] == leased[index]:
                # Equal groups stand side by side, and lead to the same states.
                continue
            # Filtered, set aside, or lost with its server.
            rest = (*leased[:index], *leased[index + 1 :])
            given_up.append((step, served, rest))
            if not complete:
                following.append((step, served, tuple(sorted((*rest, (d, True))))))
        complete = [d for d, is_complete in leased if is_complete]
        trained = []
        for batch in set(combinations(complete, groups_per_step)):
            deadlines = list(leased)
            for d in batch:
                deadlines.remove((d, True))
            if invariant(Counter(d for d, _ in deadlines), step + 1, groups_per_step):
                trained.append((step + 1, served, tuple(deadlines)))
        following += trained
        if invariant is holds:
            plain_groups = [
                PlainGroup(str(i), d, done) for i, (d, done) in enumerate(leased)
            ]
            assert (
                choose_batch(plain_groups, step, groups_per_step) is not None
            ) == bool(trained)
        if not following:
            # Nothing may have to be given up to go on.
            return "stuck", len(seen)
        for state in (*following, *given_up):
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return "kept", len(seen)


@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "num_steps"),
    [(1, 0, 9), (1, 1, 9), (1, 3, 9), (2, 0, 7), (2, 1, 8), (2, 2, 8), (3, 2, 6)],
)
def test_the_bound_is_kept_and_nothing_gets_stuck_in_all_small_runs(
    groups_per_step: int, max_staleness: int, num_steps: int
) -> None:
    verdict, num_states = explore(groups_per_step, max_staleness, num_steps, holds)
    assert verdict == "kept"
    assert num_states > 150


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "num_steps"),
    [(1, 2, 8), (2, 1, 7), (2, 2, 6), (3, 2, 5)],
)
def test_a_queue_that_holds_one_batch_is_enough_in_all_small_runs(
    groups_per_step: int, max_staleness: int, num_steps: int, more: int
) -> None:
    room = groups_per_step + more
    verdict, num_states = explore(
        groups_per_step, max_staleness, num_steps, holds, room
    )
    assert verdict == "kept"
    assert num_states > 100


def test_the_check_notices_a_queue_that_holds_less_than_one_batch() -> None:
    verdict, _ = explore(2, 1, 4, holds, 1)
    assert verdict == "stuck"


@pytest.mark.parametrize(("groups_per_step", "max_staleness"), [(1, 1), (2, 1)])
def test_the_check_itself_notices_a_rule_that_lets_groups_expire(
    groups_per_step, max_staleness
):
    verdict, _ = explore(groups_per_step, max_staleness, 3, holds_from_step)
    assert verdict == "expired"
