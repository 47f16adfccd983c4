from __future__ import annotations

import numpy as np
import pytest
from slipstream.learner.trainer.advantage import group_advantages, shuffled


def test_advantage_is_the_reward_less_its_groups_mean() -> None:
    rewards = np.array([1.0, 3.0, 10.0, 10.0, 40.0])
    found = group_advantages(rewards, ["a", "a", "b", "b", "b"], normalize_by_std=False)
    assert found.tolist() == [-1.0, 1.0, -10.0, -10.0, 20.0]


def test_equal_numbers_of_zeros_and_ones_give_minus_one_and_one() -> None:
    found = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), ["a"] * 4, normalize_by_std=True)
    assert found == pytest.approx([1, -1, -1, 1], abs=3e-6)


def test_advantage_is_divided_by_the_deviation_of_the_group_itself() -> None:
    found = group_advantages(np.array([0.0, 0.0, 3.0]), ["a"] * 3, normalize_by_std=True)
    assert found == pytest.approx([-1 / 2**0.5, -1 / 2**0.5, 2**0.5], rel=1e-5)


def test_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages(np.full(3, 0.7), ["a"] * 3, normalize_by_std=True) == pytest.approx(
        [0, 0, 0], abs=1e-9
    )


def test_groups_need_not_stand_together() -> None:
    found = group_advantages(np.array([1.0, 5.0, 3.0, 7.0]), list("abab"), normalize_by_std=False)
    assert found.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_shuffled_rewards_are_the_same_ones_in_an_order_that_seed_and_step_decide() -> None:
    rewards = np.arange(32.0)
    found = shuffled(rewards, seed=1, step=3)
    assert sorted(found) == rewards.tolist()
    assert found.tolist() != rewards.tolist()
    assert found.tolist() == shuffled(rewards, seed=1, step=3).tolist()
    assert found.tolist() != shuffled(rewards, seed=1, step=4).tolist()
    assert found.tolist() != shuffled(rewards, seed=2, step=3).tolist()
