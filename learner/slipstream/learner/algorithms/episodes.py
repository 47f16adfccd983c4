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
from slipstream.core.types import TokenArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Turn:
    """One reply of the model, and what the model read before it."""

    # The reply's tokens among the sampled tokens of the episode.
    span: slice
    # The ids of the tokens that the model read since the reply before: the whole prompt, or the
    # environment's messages. No text: ranks have no tokenizer, and ids tell states apart.
    context: TokenArray
    # The ids of the sampled tokens.
    reply: TokenArray


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
    # The parts of `reward` where they were earned; None: the last token earned all.
    earned: FloatArray | None = None
    # The replies, branch by branch.
    turns: tuple[Turn, ...] = ()

    def token_rewards(self) -> FloatArray:
        """Returns each sampled token's reward: minus its cost, plus what it earned.

        At the end of a branch it has what later branches earned, too.
        """
        rewards = -self.token_costs
        later = self.reward
        if self.earned is not None:
            rewards += self.earned
            later = 0.0
        for branch in reversed(self.branches):
            if len(rewards[branch]):
                rewards[branch][-1] += later
            if self.earned is not None:
                later += float(self.earned[branch].sum())
        return rewards

    def spans(self) -> list[list[slice]]:
        """Returns each branch's turns as spans of sampled tokens; a branch without turns is one."""
        spans_of_branches = []
        for branch in self.branches:
            start, stop, _ = branch.indices(len(self.token_costs))
            turn_spans = [turn.span for turn in self.turns if start <= turn.span.start < stop]
            spans_of_branches.append(turn_spans or [slice(start, stop)])
        return spans_of_branches

    def returns(self, gamma: float = 1.0) -> FloatArray:
        """Returns the return of each token: its own reward and all later ones of its branch.

        Each turn between a token and a reward is a factor `gamma`, so the return of a turn is that
        of its first token.
        """
        rewards = self.token_rewards()
        returns = np.zeros_like(rewards)
        for spans in self.spans():
            following = 0.0
            for span in reversed(spans):
                sums = np.cumsum(np.append(rewards[span], gamma * following)[::-1])
                returns[span], following = sums[:0:-1], float(sums[-1])
        return returns


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
    of a group, as if the side were a group. A filter gets all sides of a group, with both rewards:
    groups are told apart by what the environment says, and trained by the shaped reward.
    """

    # The environment's.
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
    # The result of the function `reward`; None before its call.
    changed_reward: float | None = None

    @property
    def shaped_reward(self) -> float:
        """The reward that is trained: the environment's, changed by the function `reward`."""
        return self.reward if self.changed_reward is None else self.changed_reward
