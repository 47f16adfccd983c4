"""Leases just in time: as fast as eager ones, with less lag where generation is the faster part."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
from slipstream.core.types import GroupId, ServerId
from slipstream.learner.controller.lease_pace import CALM_STEPS, JustInTime
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.servers.server_states import ServerKey
from support.rigs.fuzz_budget import times

SERVER = ServerKey(ServerId("s"), 1)
STEP_S = 1.0


def pace(*, groups_per_step: int = 2, max_staleness: int = 3) -> JustInTime:
    return JustInTime(groups_per_step=groups_per_step, max_staleness=max_staleness)


def one_step(found: JustInTime, given_s: float, *, step_s: float = 10.0) -> float:
    """The trainer takes a batch and asks for the next one; when."""
    found.batch_given(given_s)
    found.trainer_asks(given_s + step_s)
    return given_s + step_s


def test_nothing_is_held_back_before_groups_and_steps_were_measured() -> None:
    found = pace()
    assert found.limit(0.0) is None
    found.group_done(3.0)
    one_step(found, 0.0)
    assert found.limit(10.0) is None
    found.group_done(3.0)
    assert found.limit(10.0) == 2


@pytest.mark.parametrize(("slowest_s", "groups"), [(0.1, 2), (10.0, 2), (10.1, 4), (35.0, 8)])
def test_as_many_batches_are_in_flight_as_the_slowest_group_takes_steps(
    slowest_s: float, groups: int
) -> None:
    found = pace()
    for group_s in (0.1, slowest_s, 0.1):
        found.group_done(group_s)
    found.batch_given(one_step(found, 0.0))
    assert found.limit(11.0) == groups


def test_a_trainer_that_waits_makes_room_by_and_by() -> None:
    found = pace()
    found.group_done(1.0)
    found.group_done(1.0)
    asked = one_step(found, 0.0)
    assert [found.limit(asked + waited) for waited in (0.0, 0.1, 10.0, 10.1)] == [2, 4, 4, 6]


def test_waits_add_a_batch_each_and_calm_takes_one_back() -> None:
    found = pace(max_staleness=2)
    found.group_done(1.0)
    found.group_done(1.0)
    now = one_step(found, 0.0)
    for limit in (4, 6, 6):
        now = one_step(found, now + 1.0)
        found.batch_given(now)
        assert found.limit(now) == limit
        found.trainer_asks(now + 10.0)
        now += 10.0
    for _ in range(CALM_STEPS):
        now = one_step(found, now)
    found.batch_given(now)
    assert found.limit(now) == 4


def test_a_step_that_was_broken_off_is_not_measured() -> None:
    found = pace()
    one_step(found, 0.0)
    found.batch_given(10.0)
    found.trainer_lost()
    found.trainer_asks(1000.0)
    assert found.step_s == 10.0


@dataclass
class Fleet:
    """How long groups take, and which of them are trained."""

    # Mean and spread of the logarithm's normal distribution.
    group_s: float
    spread: float = 0.5
    # Up to `capacity` episodes run at full speed; more share that speed.
    capacity: float = math.inf
    kept: float = 1.0
    seed: int = 0

    def work_s(self, group: GroupId) -> float:
        draw = random.Random(f"{self.seed}/{group}").gauss(-(self.spread**2) / 2, self.spread)
        return self.group_s * math.exp(draw)

    def keeps(self, group: GroupId) -> bool:
        return random.Random(f"{self.seed}/{group}/kept").random() < self.kept


@dataclass
class Simulation:
    """A trainer and a fleet, from event to event; the book refuses what breaks the promise."""

    fleet: Fleet
    groups_per_step: int
    max_staleness: int
    just_in_time: bool
    num_steps: int = 100
    now_s: float = 0.0
    lags: list[int] = field(default_factory=list)

    def run(self) -> Simulation:
        self.book = LeaseBook(
            attempts_per_lease=7,
            groups_per_step=self.groups_per_step,
            group_size=1,
            max_staleness=self.max_staleness,
            num_steps=self.num_steps,
        )
        self.pace = pace(groups_per_step=self.groups_per_step, max_staleness=self.max_staleness)
        self.work: dict[GroupId, float] = {}
        self.leased: dict[GroupId, tuple[float, int]] = {}
        self.version, self.ready_s = 0, None
        speed = random.Random(self.fleet.seed)
        while self.version < self.num_steps:
            self._lease()
            if self.ready_s is None:
                self.pace.trainer_asks(self.now_s)
                batch = self.book.take_batch()
                if batch is not None:
                    self.pace.batch_given(self.now_s)
                    self.lags += [self.version - self.leased[g.group_id][1] for g in batch]
                    self.ready_s = self.now_s + STEP_S * math.exp(speed.gauss(0, 0.1))
                    continue
            self._go_on()
        return self

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.now_s

    @property
    def lag(self) -> float:
        """Mean lag without the first fifth, when nothing was measured yet."""
        return statistics.fmean(self.lags[len(self.lags) // 5 :])

    def _lease(self) -> None:
        while self.book.may_lease(self.version):
            limit = self.pace.limit(self.now_s) if self.just_in_time else None
            if limit is not None and len(self.book.training_groups()) >= limit:
                return
            group = self.book.lease("e", 0, 0, SERVER, self.version).group_id
            self.work[group] = self.fleet.work_s(group)
            self.leased[group] = (self.now_s, self.version)

    def _go_on(self) -> None:
        """Moves time to the next end of a group or step, or to where the limit may have grown."""
        speed = min(1.0, self.fleet.capacity / len(self.work)) if self.work else 1.0
        ends = [left / speed for left in self.work.values()]
        ends.append(STEP_S / 4 if self.ready_s is None else self.ready_s - self.now_s)
        passed = min(ends)
        self.now_s += passed
        for group in list(self.work):
            self.work[group] -= passed * speed
            if self.work[group] <= 1e-9:
                self._finish(group)
        if self.ready_s is not None and self.now_s >= self.ready_s - 1e-9:
            self.version, self.ready_s = self.version + 1, None

    def _finish(self, group: GroupId) -> None:
        del self.work[group]
        self.pace.group_done(self.now_s - self.leased[group][0])
        self.book.groups[group].finished[0] = None
        if not self.fleet.keeps(group):
            self.book.remove(group)


FLEETS = {
    "fast": Fleet(0.1),
    "fast with few places": Fleet(0.05, spread=1.0, capacity=8),
    "fast, half is filtered": Fleet(0.1, kept=0.5),
    "nearly a step": Fleet(0.5),
    "more than a step": Fleet(1.5, spread=0.8),
    "as fast as the trainer": Fleet(0.24, capacity=2),
    "slower than the trainer": Fleet(1.0, capacity=2),
    "long tail": Fleet(0.3, spread=1.2),
    "most is filtered": Fleet(0.3, kept=0.25),
}
FAST = [name for name in FLEETS if name.startswith("fast")]


@pytest.mark.parametrize("max_staleness", [2, 4])
@pytest.mark.parametrize("name", FLEETS)
def test_leases_just_in_time_are_as_fast_as_eager_ones(name: str, max_staleness: int) -> None:
    eager = Simulation(FLEETS[name], 8, max_staleness, just_in_time=False).run()
    late = Simulation(FLEETS[name], 8, max_staleness, just_in_time=True).run()
    assert late.steps_per_s >= 0.95 * eager.steps_per_s
    assert max(late.lags) <= max_staleness
    assert late.lag <= eager.lag + 0.05
    if name in FAST:
        assert eager.lag >= max_staleness - 0.1
        assert late.lag <= 1.5


def test_random_fleets_and_sizes_never_stall() -> None:
    draws = random.Random(0)
    for seed in range(times(15)):
        fleet = Fleet(
            math.exp(draws.uniform(-4, 2)),
            spread=draws.uniform(0.0, 1.5),
            capacity=draws.choice([1, 2, 4, 16, math.inf]),
            kept=draws.choice([1.0, 0.5, 0.2]),
            seed=seed,
        )
        sizes = (draws.randint(1, 6), draws.randint(0, 4))
        eager = Simulation(fleet, *sizes, just_in_time=False, num_steps=40).run()
        late = Simulation(fleet, *sizes, just_in_time=True, num_steps=40).run()
        assert late.steps_per_s >= 0.9 * eager.steps_per_s, (fleet, sizes)
