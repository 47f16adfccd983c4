"""Facts of a run's summary."""

from __future__ import annotations

import pytest
from slipstream.learner.controller.reporting.run_facts import RunFacts


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([], [], []),
        ([0.5], [0.5], [0.5]),
        ([0.0, 1.0], [0.0], [1.0]),
        ([0.0, 0.5, 1.0], [0.0], [1.0]),
        ([*range(9)], [0, 1, 2, 3], [5, 6, 7, 8]),
        ([*range(10)], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ([*range(99)], [0, 1, 2, 3, 4], [94, 95, 96, 97, 98]),
    ],
)
def test_first_and_last_rewards_are_those_of_other_steps(
    rewards: list[float], first: list[float], last: list[float]
) -> None:
    facts = RunFacts()
    for reward in rewards:
        facts.steps += 1
        facts.count_row({"reward_mean": reward})
    assert facts.edge_rewards() == (first, last)
