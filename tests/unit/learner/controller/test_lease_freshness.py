"""Leases wait for the next version where that keeps the trainer fed, and never without an end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from schedule_simulation import Machines, Schedule, Simulation, Work, lognormal
from slipstream.learner.controller.lease_freshness import FIRST_STEPS, Freshness


def measured(*, waited_s: float, worked_s: float, steps: int = FIRST_STEPS) -> Freshness:
    """A freshness after these steps, whose trainer has a batch."""
    found, now_s = Freshness(), 100.0
    for _ in range(steps + 1):
        found.trainer_asks(now_s)
        found.batch_given(now_s + waited_s)
        now_s += waited_s + worked_s
    return found


def waits(found: Freshness, *, max_staleness: int = 1, taken: int = 0) -> bool:
    return found.waits(max_staleness=max_staleness, taken=taken, places=10)


@pytest.mark.parametrize(
    ("max_staleness", "waited_s", "expected"),
    [(0, 9.0, 0), (1, 2.75, 0), (1, 3.25, 1), (2, 5.75, 0), (2, 6.25, 1), (4, 9.75, 0)],
)
def test_leases_wait_if_the_trainer_does_and_the_bound_is_small(
    max_staleness: int, waited_s: float, expected: int
) -> None:
    found = measured(waited_s=waited_s, worked_s=10.0 - waited_s)
    assert found.waiting_share == pytest.approx(waited_s / 10.0)
    assert waits(found, max_staleness=max_staleness) is bool(expected)


def test_leases_never_wait_where_servers_are_short_of_places() -> None:
    found = measured(waited_s=8.0, worked_s=2.0)
    assert [waits(found, taken=taken) for taken in (0, 5, 6, 10)] == [True, True, False, False]


def test_leases_go_out_as_soon_as_the_trainer_asks_or_is_lost() -> None:
    found = measured(waited_s=8.0, worked_s=2.0)
    assert waits(found)
    # Its present batch was given at 100 + 4 * 10 + 8.
    found.trainer_asks(150.0)
    found.trainer_asks(151.0)
    assert not waits(found)
    found.batch_given(158.0)
    assert found.waiting_share == pytest.approx(0.8)
    assert waits(found)
    found.trainer_lost()
    assert not waits(found)


def test_nothing_waits_before_a_few_steps_were_measured() -> None:
    assert not waits(Freshness())
    assert not waits(measured(waited_s=8.0, worked_s=2.0, steps=FIRST_STEPS - 1))
    assert waits(measured(waited_s=8.0, worked_s=2.0))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_steps_get_shorter_where_long_replies_hold_the_trainer_up(max_staleness: int) -> None:
    before = sum(step_s(max_staleness, Schedule(fresh="never"), seed) for seed in (1, 2, 3))
    ours = sum(step_s(max_staleness, Schedule(), seed) for seed in (1, 2, 3))
    assert ours < 0.99 * before


@pytest.mark.parametrize("max_staleness", [4, 8])
def test_nothing_changes_with_a_wider_bound(max_staleness: int) -> None:
    before = step_s(max_staleness, Schedule(fresh="never"))
    assert step_s(max_staleness, Schedule()) == before


@pytest.mark.parametrize(
    ("training_s", "places", "max_staleness"),
    itertools.product((0.05, 2.0), (8, 64), (0, 1, 2)),
)
def test_no_group_waits_without_an_end(training_s: float, places: int, max_staleness: int) -> None:
    machines = replace(SMALL, training_s=training_s, max_episodes=places)
    # Each step ends: a group that waited longer than the bound allows would stop them.
    result = Simulation(machines, work(max_staleness, seed=3), Schedule()).run(STEPS)
    assert result.longest_wait_steps <= max_staleness


# The speeds of the default machine, for a quarter of its episodes.
SMALL = Machines(max_episodes=64, request_s=4 * 13.7e-6)
STEPS = 54


def work(max_staleness: int, seed: int = 1) -> Work:
    groups, expected = lognormal(4 * (STEPS + 4 * (max_staleness + 1)), seed, group_size=8)
    return Work(groups, expected, 4, max_staleness)


def step_s(max_staleness: int, schedule: Schedule, seed: int = 1) -> float:
    return Simulation(SMALL, work(max_staleness, seed), schedule).run(STEPS).step_s
