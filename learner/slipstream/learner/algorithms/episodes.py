"""The inputs and results of advantages, rewards and filters: the episodes of a batch or group.

    def advantage(episodes: Sequence[ScoredEpisode], *, ...) -> FloatArray | Sequence[FloatArray]
    def reward(group: Sequence[RewardedEpisode], *, ...) -> Sequence[float | ShapedReward]
    def filter(group: Sequence[RewardedEpisode], *, ...) -> bool

All are pure functions. The keyword-only parameters are arguments from the configuration, checked
by their annotations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScoredEpisode:
    """One episode of a batch, or one side's part of it; arrays are [sampled tokens].

    A side is, for example, a player of a game.

    An advantage function returns one number or one array per episode. With a critic it returns one
    `TokenAdvantages` per episode, with the critic's targets.
    """

    # Episodes are compared within a group.
    group_id: str
    # The reward after the function `reward`.
    reward: float
    # Cost of each token, for example its divergence from the reference model.
    token_costs: FloatArray
    # The critic's estimate before each token was sampled.
    values: FloatArray | None = None
    # The sampled tokens of each branch: only these follow each other.
    branches: tuple[slice, ...] = (slice(None),)
    # The metrics that the environment measured.
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Versions between the sampling of each token and this step.
    lags: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def token_rewards(self) -> FloatArray:
        """Returns each sampled token's reward: minus its cost, plus `reward` at a branch's end."""
        rewards = -self.token_costs
        for branch in self.branches:
            if len(rewards[branch]):
                rewards[branch][-1] += self.reward
        return rewards


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of one episode, [sampled tokens]; `returns` are the critic's targets.

    Each of the `reports` becomes a metric of its name: the mean over the episodes that report it.
    """

    advantages: FloatArray
    returns: FloatArray | None = None
    reports: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShapedReward:
    """The changed reward of one episode; `reports` become metrics, as in `TokenAdvantages`."""

    reward: float
    reports: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardedEpisode:
    """One episode of a group, or one side's part of it, before the episode is trained.

    In a game whose sides have their own rewards, the reward function is called once for each side
    of a group, as if the side were a group. A filter gets all sides of a group, with the rewards
    that the reward function returned.
    """

    reward: float
    # The metrics that the environment measured.
    metrics: Mapping[str, float]
    # Whether a limit of reply, episode or turns ended the episode.
    is_truncated: bool
    # Sampled tokens of each reply, of all sides.
    reply_tokens: tuple[int, ...]
    # Limit of each reply.
    max_reply_tokens: int
    environment: str
    task_index: int
    # The name of the branches with a reward of their own; "" for all others.
    side: str = ""
    # The values that the function `reward` reported of the episode.
    reports: Mapping[str, float] = field(default_factory=dict)
