"""When groups with equal rewards end a run, and how."""

from __future__ import annotations

from slipstream.learner.controller.records.history import FilteredGroups, FilterVerdict, is_solved


def filtered(**environments: list[float]) -> FilteredGroups:
    groups = FilteredGroups()
    for name, rewards in environments.items():
        for reward in rewards:
            groups.add(name, reward, solved=is_solved([reward, reward], 1.0))
    return groups


def test_a_run_goes_on_below_the_limit() -> None:
    assert filtered(a=[1.0, 1.0], b=[0.0]).verdict(4) is FilterVerdict.GO_ON


def test_solved_groups_of_all_environments_are_a_solved_task() -> None:
    assert filtered(a=[1.0, 1.0], b=[1.0, 2.0]).verdict(4) is FilterVerdict.SOLVED


def test_one_group_that_is_not_solved_is_no_success() -> None:
    assert filtered(a=[1.0] * 30, b=[0.99]).verdict(4) is FilterVerdict.STUCK
    assert filtered(a=[0.0] * 4).verdict(4) is FilterVerdict.STUCK


def test_every_episode_of_a_solved_group_has_the_full_reward() -> None:
    # Equal after a penalty: they were filtered, and one of them is not right.
    assert not is_solved([1.0, 0.5], 1.0)
    assert is_solved([0.5, 0.5], 0.5)


def test_a_batch_begins_the_count_again() -> None:
    groups = filtered(a=[1.0] * 4)
    groups.clear()
    assert groups.total == 0
    groups.add("a", 1.0, solved=True)
    assert groups.verdict(2) is FilterVerdict.GO_ON


def test_the_cause_names_numbers_and_rewards_of_each_environment() -> None:
    assert filtered(b=[0.0, 1.0], a=[1.0]).describe() == (
        "a: 1 of 1 solved, mean reward 1; b: 1 of 2 solved, mean reward 0.5"
    )
