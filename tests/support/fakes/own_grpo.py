"""GRPO by functions of one's own, written down again from the built-in ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from slipstream.learner.algorithms.episodes import (
    FloatArray,
    RewardedEpisode,
    ScoredEpisode,
    ShapedReward,
)
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms, TokenWeights


class Bounds(NamedTuple):
    low: float
    high: float


CLIP = Bounds(0.2, 0.2)


def loss(
    tokens: LossInputs, *, clip_low: float = CLIP.low, clip_high: float = CLIP.high
) -> TokenTerms:
    """PPO's loss, which reports how many tokens were clipped."""
    ratio = (tokens.logprobs - tokens.proximal_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = ratio * tokens.advantages
    clipped_gain = clipped * tokens.advantages
    return TokenTerms(
        -torch.minimum(gain, clipped_gain), {"own_clip_fraction": clipped_gain < gain}
    )


def weight(tokens: LossInputs, *, cap: float = 2.0) -> TokenWeights:
    """Truncated importance weights, which report the largest ratio."""
    ratio = (tokens.proximal_logprobs - tokens.behavior_logprobs).clamp(-20, 20).exp()
    return TokenWeights(torch.where(ratio > cap, cap, ratio), {"own_ratio_max": ratio})


def advantage(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Rewards in deviations from their group's mean."""
    scores = np.array([episode.reward for episode in episodes])
    groups = np.array([episode.group_id for episode in episodes])
    advantages = np.zeros(len(scores))
    for group in set(groups.tolist()):
        centred = scores[groups == group] - scores[groups == group].mean()
        advantages[groups == group] = centred / (np.sqrt(np.mean(centred**2)) + 1e-6)
    return advantages


def reward(group: Sequence[RewardedEpisode]) -> list[ShapedReward]:
    return [
        ShapedReward(episode.reward, {"own_reward": episode.reward})
        for episode in group
    ]


def halved(group: Sequence[RewardedEpisode]) -> list[float]:
    return [episode.reward / 2 for episode in group]


# The episodes that `seen` got.
SEEN: list[ScoredEpisode] = []


def seen(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    SEEN.extend(episodes)
    return np.zeros(len(episodes))
