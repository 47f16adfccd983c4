from __future__ import annotations

import itertools

import pytest
from slipstream.learner.controller.evaluation import (
    EvaluatedEpisode,
    evaluation_statistics,
    pass_at_k,
)


def episode(task: int, reward: float, *reply_tokens: int, truncated: bool = False, **metrics):
    return EvaluatedEpisode(task, reward, reply_tokens or (1,), truncated, tuple(metrics.items()))


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_in_which_one_passes(num_samples: int):
    for num_passed in range(num_samples + 1):
        passed = [index < num_passed for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(passed, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_2_of_4_replies_with_1_that_passes_is_one_half():
    # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6; the biased 1 - (3 / 4)^2 would be 0.4375.
    assert pass_at_k(4, 1, 2) == 0.5


def test_rewards_lengths_and_cut_off_replies_are_told():
    episodes = [
        episode(0, 0.0, 2, 4),
        episode(1, 1.0, 6, truncated=True),
        episode(2, 4.0, 8),
    ]
    found = evaluation_statistics(episodes, num_failed=2, pass_at=(1,), pass_reward=1.0)
    assert found == {
        "reward_mean": pytest.approx(5 / 3),
        # Squares of the differences: 25/9, 4/9, 49/9; their mean is 78/27.
        "reward_std": pytest.approx((78 / 27) ** 0.5),
        "reward_min": 0.0,
        "reward_max": 4.0,
        "reward_median": 1.0,
        "reply_tokens_mean": 5.0,
        "reply_tokens_max": 8.0,
        "truncated_fraction": pytest.approx(1 / 3),
        "pass_at_1": pytest.approx(2 / 3),
        "num_episodes": 3.0,
        "num_failed": 2.0,
    }


def test_pass_at_k_is_a_mean_over_tasks_that_have_enough_replies():
    episodes = [episode(0, 1), episode(0, 0), episode(0, 0), episode(1, 1), episode(1, 1)]
    found = evaluation_statistics(episodes, num_failed=1, pass_at=(1, 2, 3, 4), pass_reward=1.0)
    # Task 0: 1 of 3 passes, task 1: 2 of 2.
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["pass_at_3"] == 1.0
    assert "pass_at_4" not in found


def test_a_reply_passes_from_the_given_reward_on():
    episodes = [episode(0, 0.5), episode(1, 0.49)]
    found = evaluation_statistics(episodes, num_failed=0, pass_at=(1,), pass_reward=0.5)
    assert found["pass_at_1"] == 0.5


def test_metrics_of_the_environment_are_averaged_over_the_episodes_that_have_them():
    episodes = [episode(0, 1, right=1.0), episode(1, 0, right=0.0), episode(2, 0)]
    found = evaluation_statistics(episodes, num_failed=0, pass_at=(), pass_reward=1.0)
    assert found["right"] == 0.5


def test_a_round_in_which_every_episode_failed_has_only_counts():
    found = evaluation_statistics([], num_failed=3, pass_at=(1,), pass_reward=1.0)
    assert found == {"num_episodes": 0.0, "num_failed": 3.0}
