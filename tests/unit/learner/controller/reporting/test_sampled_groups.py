"""The groups of a batch whose replies are kept as text."""

from __future__ import annotations

from slipstream.core.types import GroupId, Purpose
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.reporting.metrics import sampled_groups


def group_of(environment: str) -> Group:
    return Group(GroupId("g"), environment, 0, 0, Purpose.TRAINING, 4, 0, None)


def kept(*environments: str) -> list[int]:
    groups = [group_of(name) for name in environments]
    return [groups.index(group) for group in sampled_groups(groups)]


def test_the_first_group_of_each_environment_is_kept() -> None:
    assert kept("a", "a", "b", "a", "c", "b") == [0, 2, 4]


def test_two_groups_are_kept_where_there_is_one_environment() -> None:
    assert kept("a", "a", "a") == [0, 1]
    assert kept("a") == [0]
