from collections.abc import Sequence

import numpy as np
import pytest
from slipstream.learner.algorithms import advantages
from slipstream.learner.algorithms.advantages import (
    dr_grpo,
    grpo,
    rloo,
    score,
    whitened,
)
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode
from support.fakes.packed import algorithm


def episode(
    group: str, reward: float, costs: list[float], values: list[float] | None = None
):
    critic_values = None if values is None else np.array(values)
    return ScoredEpisode(
        group, reward, np.array(costs, dtype=np.float64), critic_values
    )


def scored(
    scores: Sequence[float] | FloatArray, groups: Sequence[str]
) -> list[ScoredEpisode]:
    return [
        episode(group, reward, []) for group, reward in zip(groups, scores, strict=True)
    ]


def token_advantages(episodes, settings):
    return advantages.token_advantages(settings, episodes, where="a test")


@pytest.mark.parametrize(
    ("advantage", "rewards", "groups", "expected"),
    [
        (dr_grpo, [1, 3, 10, 10, 40], "aabbb", [-1, 1, -10, -10, 20]),
        # Groups need not stand together.
        (dr_grpo, [1, 5, 3, 7], "abab", [-1, -1, 1, 1]),
        (grpo, [1, 0, 0, 1], "aaaa", [1, -1, -1, 1]),
        # The deviation is that of the group itself.
        (grpo, [0, 0, 3], "aaa", [-1 / 2**0.5, -1 / 2**0.5, 2**0.5]),
        (grpo, [0.7] * 3, "aaa", [0, 0, 0]),
        (rloo, [1, 2, 6, 5], ["a", "a", "a", "alone"], [-3, -1.5, 4.5, 0]),
    ],
)
def test_an_advantage_compares_a_reward_with_its_group(
    advantage, rewards, groups, expected
):
    advantages = advantage(scored(np.array(rewards, dtype=float), groups))
    assert advantages == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_whitening_runs_over_all_tokens_of_the_batch() -> None:
    # Mean of 1, 1, 1, 5 is 2, mean square deviation 3.
    advantages = whitened([np.array([1.0, 1.0, 1.0]), np.array([5.0])])
    assert np.concatenate(advantages) == pytest.approx(
        [-1 / 3**0.5] * 3 + [3**0.5], rel=1e-5
    )
    assert [len(values) for values in advantages] == [3, 1]
    assert whitened([]) == []
    assert whitened([np.array([2.0, 2.0])])[0].tolist() == [0.0, 0.0]


def test_score_of_an_episode_is_its_reward_less_the_costs_of_its_own_tokens() -> None:
    episodes = [
        episode("a", 2.0, [0.5, 0.25]),
        episode("a", 1.0, []),
        episode("b", 0.0, [1.0]),
    ]
    assert score(episodes).tolist() == [1.25, 1.0, -1.0]
    assert score([]).tolist() == []


@pytest.mark.parametrize(("kind", "last"), [("score", 1), ("none", 0)])
def test_without_a_comparison_each_token_has_the_reward_or_nothing(
    kind: str, last: int
) -> None:
    episodes = [episode("a", 0.0, [0.0, 0.0]), episode("a", 1.0, [0.0])]
    advantages = token_advantages(
        episodes, algorithm(advantage=kind, kl={"coefficient": 1.0})
    )
    assert [advantage.advantages.tolist() for advantage in advantages] == [
        [0, 0],
        [last],
    ]
    assert [advantage.returns for advantage in advantages] == [None, None]


def test_a_branch_ends_with_the_reward_and_pays_its_own_costs_only() -> None:
    costs = np.array([0.5, 0.25, 1.0, 0.5])
    tree = ScoredEpisode(
        "a", 2.0, costs, branches=(slice(0, 2), slice(2, 2), slice(2, 4))
    )
    assert tree.token_rewards().tolist() == [-0.5, 1.75, -1.0, 1.5]
    # The episode is judged as a whole.
    assert score([tree]).tolist() == [-0.25]
    (estimate,) = token_advantages([tree], algorithm(advantage="reinforce_pp"))
    returns = np.array([1.25, 1.75, 0.5, 1.5])
    assert estimate.advantages == pytest.approx(
        (returns - 1.25) / returns.std(), rel=1e-5
    )


def test_gae_begins_again_in_each_branch() -> None:
    gae_settings = {"gamma": 0.5, "lam": 0.5, "normalize": False}
    settings_of_gae = algorithm(advantage="gae", advantage_args=gae_settings)
    values = np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
    tree = ScoredEpisode("a", 3.0, np.zeros(6), values, (slice(0, 3), slice(3, 6)))
    (estimate,) = token_advantages([tree], settings_of_gae)
    # Every branch has the values and rewards of the example above.
    assert estimate.advantages.tolist() == [-0.0625, -0.25, -1.0] * 2
    assert estimate.returns.tolist() == [0.9375, 1.75, 3.0] * 2
