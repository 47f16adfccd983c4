"""The staleness promise: never broken, never stuck, whatever the servers do."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core import staleness
from slipstream.core.staleness import (
    LeasedGroup,
    choose_batch,
    deadline,
    due_groups,
    holds,
    lag,
    may_finish,
)
from support.references.plain_staleness import may_lease, must_start_afresh
from support.rigs.fuzz_budget import times

# All small runs are gone through besides; FUZZ=5 tries the schedules of a long test.
NUM_SCHEDULES = times(20_000)

sizes = st.integers(1, 4)
deadlines = st.lists(st.integers(0, 12), max_size=12)
groups = st.lists(st.tuples(st.integers(3, 9), st.booleans()), max_size=12).map(
    lambda pairs: [
        LeasedGroup(str(index), deadline_step, complete)
        for index, (deadline_step, complete) in enumerate(pairs)
    ]
)

# Expired groups are overlooked when the invariant starts at d = step instead of d = step - 1.
Invariant = Callable[[Sequence[int], int, int], bool]


def holds_from_step(leased: Sequence[int], step: int, groups_per_step: int) -> bool:
    return holds([d for d in leased if d >= step], step, groups_per_step)


@settings(deadline=None)
@given(deadlines, st.integers(0, 12), sizes)
def test_the_invariant_is_what_its_definition_says(leased, step, groups_per_step):
    by_definition = all(
        sum(each <= d for each in leased) <= (d - step + 1) * groups_per_step
        for d in range(-1, 30)
        if d >= step - 1
    )
    # A deadline below step - 1 is counted at step - 1.
    assert holds(leased, step, groups_per_step) == by_definition


@settings(deadline=None)
@given(deadlines, st.integers(0, 12), sizes, st.integers(0, 12))
def test_a_lease_is_granted_exactly_when_the_invariant_holds_with_it(
    leased: list[int], step: int, groups_per_step: int, new_deadline: int
) -> None:
    expected = may_lease(leased, step, groups_per_step, new_deadline)
    counted = staleness.may_lease(Counter(leased), step, groups_per_step, new_deadline)
    assert counted == expected


@settings(deadline=None)
@given(groups, st.integers(3, 4), sizes)
def test_a_batch_is_found_exactly_when_there_is_one(leased, step, groups_per_step):
    complete = [group for group in leased if group.complete]
    exists = any(
        holds(
            [group.deadline_step for group in leased if group not in chosen],
            step + 1,
            groups_per_step,
        )
        for chosen in combinations(complete, groups_per_step)
    )
    batch = choose_batch(leased, step, groups_per_step)
    assert (batch is not None) == exists
    if batch is not None:
        assert len(batch) == groups_per_step
        assert all(group.complete for group in batch)
        assert [group for group in leased if group in batch] == batch
        left = [group.deadline_step for group in leased if group not in batch]
        assert holds(left, step + 1, groups_per_step)


@settings(deadline=None)
@given(groups, st.integers(3, 4), sizes)
def test_a_batch_can_be_formed_as_soon_as_the_due_groups_are_complete(
    leased: list[LeasedGroup], step: int, groups_per_step: int
) -> None:
    due = due_groups(leased, step, groups_per_step)
    assert not any(group.complete for group in due)
    if not holds([group.deadline_step for group in leased], step, groups_per_step):
        return
    done = [
        LeasedGroup(group.group_id, group.deadline_step, group.complete or group in due)
        for group in leased
    ]
    if sum(group.complete for group in done) >= groups_per_step:
        assert choose_batch(done, step, groups_per_step) is not None


def test_the_deadline_is_the_served_version_and_the_bound_but_not_after_the_last_step() -> None:
    assert deadline(5, 2, 100) == 7
    assert deadline(5, 0, 100) == 5
    assert deadline(98, 4, 100) == 99
    assert lag(7, 5) == 2


def test_due_groups_go_before_groups_that_finished_earlier() -> None:
    leased = [
        LeasedGroup("young", 5, True),
        LeasedGroup("old", 3, False),
        LeasedGroup("middle", 4, True),
    ]
    assert choose_batch(leased, 3, 1) is None
    assert [group.group_id for group in due_groups(leased, 3, 1)] == ["old"]
    leased[1] = LeasedGroup("old", 3, True)
    assert [group.group_id for group in choose_batch(leased, 3, 1) or []] == ["old"]
    assert [group.group_id for group in choose_batch(leased, 3, 2) or []] == ["old", "middle"]


def test_a_server_may_finish_a_group_when_its_tokens_are_new_enough_for_the_deadline() -> None:
    assert may_finish(5, 3, 2, 100)
    assert not may_finish(5, 2, 2, 100)
    # No group of the last steps has a later deadline than the last step.
    assert may_finish(9, 9, 0, 10)


def test_an_interrupted_group_starts_afresh_only_when_a_batch_waits_and_nobody_may_finish_it():
    group, other = LeasedGroup("g", 2, False), LeasedGroup("other", 2, False)
    both = [other, group]
    assert must_start_afresh(group, both, 1, 1, [False])
    # The first of two with one step to go can be left for the last one.
    assert not must_start_afresh(other, both, 1, 1, [False])
    assert not must_start_afresh(group, both, 1, 2, [False])
    assert not must_start_afresh(group, both, 1, 1, [False, True])
    assert not must_start_afresh(group, both, 1, 1, [])


@settings(deadline=None)
@given(groups, st.integers(3, 4), sizes, st.lists(st.booleans(), max_size=3))
def test_the_batch_never_waits_for_a_group_that_was_given_up(
    leased: list[LeasedGroup], step: int, groups_per_step: int, verdicts: list[bool]
) -> None:
    afresh = [
        group
        for group in leased
        if must_start_afresh(group, leased, step, groups_per_step, verdicts)
    ]
    due = due_groups(leased, step, groups_per_step)
    assert afresh == ([g for g in leased if g in due] if verdicts and not any(verdicts) else [])
    left = [group for group in leased if group not in afresh]
    if afresh:
        assert due_groups(left, step, groups_per_step) == []


class Schedule:
    """One run with servers that lag, die and come back, driven by random numbers."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.groups_per_step = draw.choice((1, 1, 2, 2, 3, 4))
        self.max_staleness = draw.choice((0, 1, 1, 2, 3))
        self.num_steps = draw.choice((2, 3, 4, 6))
        self.served = [0] * draw.choice((1, 2, 3))
        self.step = 0
        # Sampling version, deadline, server, completeness of every leased, untrained group.
        self.leased: dict[str, tuple[int, int, int, bool]] = {}
        self.num_leases = self.num_refused = self.largest_lag = 0

    def lease(self, server: int) -> bool:
        last = deadline(self.served[server], self.max_staleness, self.num_steps)
        others = [group[1] for group in self.leased.values()]
        if not may_lease(others, self.step, self.groups_per_step, last):
            self.num_refused += 1
            return False
        self.leased[str(self.num_leases)] = (self.served[server], last, server, False)
        self.num_leases += 1
        return True

    def complete(self, key: str) -> None:
        self.leased[key] = (*self.leased[key][:3], True)

    def train(self) -> bool:
        known = [LeasedGroup(key, group[1], group[3]) for key, group in self.leased.items()]
        batch = choose_batch(known, self.step, self.groups_per_step)
        if batch is None:
            return False
        for group in batch:
            sampled, *_ = self.leased.pop(group.group_id)
            self.largest_lag = max(self.largest_lag, lag(self.step, sampled))
            assert self.largest_lag <= self.max_staleness
        self.step += 1
        assert all(group[1] >= self.step for group in self.leased.values())
        return True

    def disturb(self) -> None:
        """Something of all that can happen."""
        draw, leased = self.draw, self.leased
        match draw.randrange(10):
            case 0:
                server = draw.randrange(len(self.served))
                self.served[server] = draw.randint(self.served[server], self.step)
            case 1 | 2 | 3:
                server = draw.randrange(len(self.served))
                for _ in range(draw.randint(1, self.groups_per_step)):
                    self.lease(server)
            case 4 | 5 | 6 if leased:
                for key in draw.sample(list(leased), draw.randint(1, len(leased))):
                    self.complete(key)
            case 7 if leased:
                # Filtered, or its task was set aside.
                del leased[draw.choice(list(leased))]
            case 8:
                # A server dies: some of its groups end, others run again elsewhere.
                dead = draw.randrange(len(self.served))
                for key, group in list(leased.items()):
                    if group[2] == dead and not group[3] and draw.random() < 0.5:
                        del leased[key]
                self.served[dead] = self.step
            case _:
                if self.step < self.num_steps:
                    self.train()

    def finish(self) -> None:
        """Every server does its work: the run must end."""
        while self.step < self.num_steps:
            for key in self.leased:
                self.complete(key)
            if not self.train():
                self.served = [self.step] * len(self.served)
                granted = [self.lease(0) for _ in range(self.groups_per_step)]
                assert any(granted), "stuck"


def test_the_bound_is_kept_and_nothing_gets_stuck_in_many_random_schedules() -> None:
    refused = at_the_bound = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(seed)
        try:
            for _ in range(20):
                schedule.disturb()
            schedule.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        refused += schedule.num_refused
        at_the_bound += schedule.largest_lag == schedule.max_staleness > 0
    # The schedules are worth something: the rules had to say no, and the bound was reached.
    assert refused > NUM_SCHEDULES
    assert at_the_bound > NUM_SCHEDULES / 20


def explore(groups_per_step, max_staleness, num_steps, invariant, room=None):
    """Goes through all that two lagging servers and a controller can do; the verdict and states.

    `room`: groups that the queue holds; None: as many as the promise could ever allow and one more.
    Servers whose versions are exchanged are in the same state: the older version stands first.
    """
    places = groups_per_step * (max_staleness + 1) + 1 if room is None else room
    start = (0, (0, 0), ())
    seen, todo = {start}, [start]
    while todo:
        step, served, leased = todo.pop()
        if any(d < step for d, _ in leased):
            return "expired", len(seen)
        if step == num_steps:
            continue
        following, given_up = [], []
        for server, version in product(range(2), range(step + 1)):
            if version > served[server]:
                newer = tuple(sorted((version, served[1 - server])))
                following.append((step, newer, leased))
        if len(leased) < places:
            for version in set(served):
                last = deadline(version, max_staleness, num_steps)
                if invariant([*(d for d, _ in leased), last], step, groups_per_step):
                    following.append((step, served, tuple(sorted((*leased, (last, False))))))
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
        for chosen in set(combinations(complete, groups_per_step)):
            left = list(leased)
            for d in chosen:
                left.remove((d, True))
            if invariant([d for d, _ in left], step + 1, groups_per_step):
                trained.append((step + 1, served, tuple(left)))
        following += trained
        if invariant is holds:
            known = [LeasedGroup(str(i), d, done) for i, (d, done) in enumerate(leased)]
            assert (choose_batch(known, step, groups_per_step) is not None) == bool(trained)
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
    ("groups_per_step", "max_staleness", "num_steps"), [(1, 2, 8), (2, 1, 7), (2, 2, 6), (3, 2, 5)]
)
def test_a_queue_that_holds_one_batch_is_enough_in_all_small_runs(
    groups_per_step: int, max_staleness: int, num_steps: int, more: int
) -> None:
    room = groups_per_step + more
    verdict, num_states = explore(groups_per_step, max_staleness, num_steps, holds, room)
    assert verdict == "kept"
    assert num_states > 100


def test_the_check_notices_a_queue_that_holds_less_than_one_batch() -> None:
    verdict, _ = explore(2, 1, 4, holds, 1)
    assert verdict == "stuck"


@pytest.mark.parametrize(("groups_per_step", "max_staleness"), [(1, 1), (2, 1)])
def test_the_check_itself_notices_a_rule_that_lets_groups_expire(groups_per_step, max_staleness):
    verdict, _ = explore(groups_per_step, max_staleness, 3, holds_from_step)
    assert verdict == "expired"
