"""The simulated run is the measured one, and its bounds are bounds."""

from __future__ import annotations

import pytest
from schedule_simulation import (
    Machines,
    Schedule,
    Simulation,
    Work,
    bound_s,
    ceiling_s,
    lognormal,
    stratified,
)
from schedules import BEST, lines_of


@pytest.mark.parametrize(
    ("max_staleness", "measured_s", "places"), [(8, 0.436, 172), (16, 0.366, 248)]
)
def test_a_simulated_step_takes_as_long_as_on_two_gpus(
    max_staleness: int, measured_s: float, places: int
) -> None:
    # benchmarks/results/asynchrony.md, contexts kept.
    work = Work(stratified(8 * 150), [0] * (8 * 150), 8, max_staleness)
    found = Simulation(Machines(), work, Schedule()).run(80)
    assert found.step_s == pytest.approx(measured_s, rel=0.06)
    assert found.open_episodes == pytest.approx(places, rel=0.06)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_schedule_is_faster_than_the_bound(max_staleness: int) -> None:
    groups, expected = lognormal(4 * (54 + 4 * (max_staleness + 1)), 5, group_size=8)
    work = Work(groups, expected, 4, max_staleness)
    machines = Machines(max_episodes=64, request_s=4 * 13.7e-6)
    bound = bound_s(machines, work)
    assert bound >= ceiling_s(machines, work)
    for schedule in (Schedule(), Schedule(fresh=True), Schedule(due_first=True)):
        # The steps that count are not all steps, so a run of few steps may be a little ahead.
        assert Simulation(machines, work, schedule).run().step_s > 0.97 * bound


def test_one_reply_in_a_group_gives_the_bound_by_hand() -> None:
    # Batches of one group, max_staleness 1: every third batch needs its 300 engine steps.
    work = Work([[300]] * 9, [300] * 9, 1, 1)
    machines = Machines(step_s=1e-2, request_s=1e-3, training_s=0.1, publish_s=0.0)
    # 9 groups have 3 batches that share no step: (3 * 300 * 0.01 + 9 * 300 * 0.001) / 9.
    assert bound_s(machines, work) == pytest.approx(1.3)


def test_the_table_compares_each_seed_with_its_own_best() -> None:
    found = {
        "1": {BEST: [{"step_s": 1.0}, {"step_s": 2.0}], "ours": [{"step_s": 2.0}, {"step_s": 4.0}]}
    }
    found["1"]["ceiling"] = [{"step_s": 0.5}, {"step_s": 1.0}]
    assert lines_of(found)[3].split(" | ")[5:] == ["0.50 (0.50-0.50)", "0.25 (0.25-0.25) |"]
