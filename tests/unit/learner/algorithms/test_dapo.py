"""DAPO as docs/algorithms.md names it: groups are chosen by answers, and trained with lengths."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from slipstream.core.settings.config import Config
from slipstream.core.types import GroupId, Trajectory
from slipstream.learner.algorithms.functions import is_trained, shaped_rewards
from slipstream.learner.controller.trajectories.formed_batch import equal_rewards
from slipstream.learner.trainer.algorithms.loss import training_sequences
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.small_configs import config_with

LENGTHS = (400, 900, 950, 1000)
DAPO = {
    "sampling.max_reply_tokens": 1000,
    "sampling.max_episode_tokens": 1100,
    "learner.micro_batch_tokens": 2048,
    "algorithm.group_size": 4,
    "algorithm.loss_args": {"clip_high": 0.28},
    "algorithm.filter": "unequal_rewards",
    "algorithm.reward": "overlong",
    "algorithm.reward_args": {"penalty": 1.0, "cache_tokens": 200},
}


def group_of(*rewards: float) -> list[Trajectory]:
    episodes = zip(rewards, LENGTHS, strict=True)
    return [
        dataclasses.replace(
            make_trajectory(3, length),
            member=member,
            group_id=GroupId("g1"),
            reward=reward,
        )
        for member, (reward, length) in enumerate(episodes)
    ]


def shaped(group: list[Trajectory], config: Config) -> list[float]:
    return [
        side.shaped_reward for sides in shaped_rewards(group, config) for side in sides
    ]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_answers_that_are_all_alike_are_left_out_however_long_they_are(
    reward: float,
) -> None:
    config = config_with(DAPO)
    group = group_of(reward, reward, reward, reward)
    assert shaped(group, config) == [reward, reward - 0.5, reward - 0.75, reward - 1.0]
    assert not is_trained(group, config)
    assert equal_rewards([group], config)["equal_rewards_fraction"] == 1.0


def test_a_group_that_is_trained_learns_from_answers_less_their_penalties() -> None:
    config = config_with(DAPO)
    group = group_of(1.0, 0.0, 1.0, 0.0)
    assert is_trained(group, config)
    assert equal_rewards([group], config)["equal_rewards_fraction"] == 0.0
    # 1 - 0, 0 - 0.5, 1 - 0.75 and 0 - 1, whose mean is -0.0625 and whose deviation is 0.7577722.
    assert shaped(group, config) == [1.0, -0.5, 0.25, -1.0]
    batch = Batch(step=100, batch_id="b", trajectories=tuple(group))
    advantages = [
        sequence.advantages[sequence.loss_mask]
        for sequence in training_sequences(batch, config)
    ]
    expected = [1.0625, -0.4375, 0.3125, -0.9375]
    for token_advantages, centred, length in zip(
        advantages, expected, LENGTHS, strict=True
    ):
        assert len(token_advantages) == length
        np.testing.assert_allclose(
            token_advantages, centred / (0.7577722 + 1e-6), rtol=1e-6
        )


def test_ones_own_filter_sees_the_environments_reward_and_the_shaped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_filter_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def is_mixed(group):\n"
        "    assert [e.shaped_reward for e in group] == [0.0, -0.5, -0.75, -1.0]\n"
        "    return len({e.reward for e in group}) > 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = config_with(DAPO | {"algorithm.filter": f"{name}:is_mixed"})
    assert not is_trained(group_of(0.0, 0.0, 0.0, 0.0), config)
