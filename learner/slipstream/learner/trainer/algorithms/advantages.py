"""Advantages of sampled tokens, from the rewards of a batch: pure functions, float64.

Sequence-level estimators give one number for each episode, token-level estimators one for each
sampled token. Only sampled tokens are steps: the context between the replies of an episode is
skipped. A branch is a sequence of steps of its own, which ends with the episode's reward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from slipstream.core.rewards import side_of
from slipstream.core.settings.algorithm_section import AlgorithmSection, GaeSection
from slipstream.core.types import Trajectory

FloatArray = npt.NDArray[np.float64]

STD_EPS = 1e-6


@dataclass(frozen=True)
class ScoredEpisode:
    """The inputs of the estimators for one episode; arrays are [sampled tokens]."""

    group_id: str
    # Reward of the episode, penalties on the whole episode included.
    reward: float
    # Cost of each token, for example its divergence from the reference model.
    token_costs: FloatArray
    # The critic's estimate before each token was sampled.
    values: FloatArray | None = None
    # The sampled tokens of each branch: only they follow each other.
    branches: tuple[slice, ...] = (slice(None),)

    def token_rewards(self) -> FloatArray:
        """Returns the reward at the last token of each branch, less the cost of each token."""
        rewards = -self.token_costs
        for branch in self.branches:
            if len(rewards[branch]):
                rewards[branch][-1] += self.reward
        return rewards


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of one episode, [sampled tokens]; `returns` are the critic's targets."""

    advantages: FloatArray
    returns: FloatArray | None = None


def token_advantages(
    episodes: Sequence[ScoredEpisode], algorithm: AlgorithmSection
) -> list[TokenAdvantages]:
    """Returns the advantages of all tokens of a batch, by `algorithm.advantage`.

    `episodes` are those that count: filtered episodes are in no statistic.
    """
    groups = [episode.group_id for episode in episodes]
    scores = episode_scores(episodes)
    match algorithm.advantage:
        case "grpo":
            return _spread(group_advantages(scores, groups, normalize_by_std=True), episodes)
        case "dr_grpo":
            return _spread(group_advantages(scores, groups, normalize_by_std=False), episodes)
        case "rloo":
            return _spread(leave_one_out_advantages(scores, groups), episodes)
        case "reinforce_pp":
            returns = [
                np.concatenate([returns_to_go(rewards[branch]) for branch in episode.branches])
                for episode, rewards in ((each, each.token_rewards()) for each in episodes)
            ]
            return [TokenAdvantages(values) for values in whitened(returns)]
        case "reinforce_pp_baseline":
            centred = _spread(group_advantages(scores, groups, normalize_by_std=False), episodes)
            return [TokenAdvantages(a) for a in whitened([c.advantages for c in centred])]
        case "gae":
            return _gae_of(episodes, algorithm.gae)
        case "score":
            return _spread(scores, episodes)
        case "none":
            return _spread(np.zeros(len(episodes)), episodes)


def episode_scores(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns the reward of each episode, less the costs of its tokens."""
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    if not episodes:
        return rewards
    costs = np.concatenate([episode.token_costs for episode in episodes])
    places = np.repeat(np.arange(len(episodes)), [len(e.token_costs) for e in episodes])
    return rewards - np.bincount(places, weights=costs, minlength=len(episodes))


def group_advantages(
    scores: FloatArray, group_ids: Sequence[str], *, normalize_by_std: bool
) -> FloatArray:
    """Returns each score less its group's mean, divided by deviation + 1e-6 if asked for.

    The standard deviation is that of the group itself, without a correction of the degrees of
    freedom. Rewards 0 and 1 in equal numbers give -1 and 1; a group of equal rewards gives 0.
    Source: GRPO (arXiv:2402.03300); without the deviation Dr. GRPO (arXiv:2503.20783), which shows
    that dividing by it favours tasks that are nearly always or nearly never solved.
    """
    advantages = np.zeros(len(scores), dtype=np.float64)
    for members in _groups(group_ids):
        centred = scores[members] - scores[members].mean()
        if normalize_by_std:
            centred = centred / (np.sqrt(np.mean(centred**2)) + STD_EPS)
        advantages[members] = centred
    return advantages


def leave_one_out_advantages(scores: FloatArray, group_ids: Sequence[str]) -> FloatArray:
    """Returns each score less the mean of the other scores of its group; 0 for a group of 1.

    Source: RLOO (arXiv:2402.14740). The result is n / (n - 1) times (score - group's mean).
    """
    advantages = np.zeros(len(scores), dtype=np.float64)
    for members in _groups(group_ids):
        number = int(members.sum())
        if number > 1:
            others = (scores[members].sum() - scores[members]) / (number - 1)
            advantages[members] = scores[members] - others
    return advantages


def returns_to_go(rewards: FloatArray) -> FloatArray:
    """Returns the sum of the rewards of each token and of all later tokens; not discounted."""
    return np.cumsum(rewards[::-1])[::-1]


def whitened(values: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns `values` scaled to mean 0 and deviation 1 over all tokens of the batch.

    Equal values give 0. Source: REINFORCE++ (arXiv:2501.03262), which normalises over the global
    batch instead of within groups.
    """
    joined = np.concatenate(list(values)) if values else np.zeros(0)
    if not joined.size:
        return list(values)
    mean = joined.mean()
    deviation = np.sqrt(np.mean((joined - mean) ** 2))
    return [(array - mean) / (deviation + STD_EPS) for array in values]


def gae(
    rewards: FloatArray, values: FloatArray, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """Returns advantages and returns (advantage + value) of one episode, both [sampled tokens].

    With d(t) = r(t) + gamma * V(t + 1) - V(t) and V = 0 after the last token, the advantage is
    A(t) = d(t) + gamma * lam * A(t + 1). An episode that was cut at a limit ends like any other:
    its environment has judged it. Source: generalised advantage estimation (arXiv:1506.02438), as
    in PPO (arXiv:1707.06347).
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    following_value, following_advantage = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        advantages[t] = following_advantage
        following_value = values[t]
    return advantages, advantages + values


def shuffled(rewards: FloatArray, *, seed: int, step: int) -> FloatArray:
    """Returns the rewards in a random order set by `seed` and `step`, for a control experiment."""
    return np.random.default_rng([seed, step]).permutation(rewards)


def _gae_of(episodes: Sequence[ScoredEpisode], settings: GaeSection) -> list[TokenAdvantages]:
    advantages, returns = [], []
    for episode in episodes:
        assert episode.values is not None, "gae needs the values of a critic"
        rewards, values = episode.token_rewards(), episode.values
        found = [
            gae(rewards[branch], values[branch], gamma=settings.gamma, lam=settings.lam)
            for branch in episode.branches
        ]
        advantages.append(np.concatenate([one[0] for one in found]))
        returns.append(np.concatenate([one[1] for one in found]))
    if settings.normalize:
        advantages = whitened(advantages)
    return [TokenAdvantages(a, r) for a, r in zip(advantages, returns, strict=True)]


def _spread(advantages: FloatArray, episodes: Sequence[ScoredEpisode]) -> list[TokenAdvantages]:
    costs = [episode.token_costs for episode in episodes]
    spread = np.repeat(advantages, list(map(len, costs)))
    return [TokenAdvantages(spread[start:end]) for start, end in _bounds(costs)]


def _groups(group_ids: Sequence[str]) -> list[npt.NDArray[np.bool_]]:
    """Returns the mask of each group's members, in the order in which groups first appear."""
    ids = np.asarray(group_ids)
    return [ids == group_id for group_id in dict.fromkeys(group_ids)]


@dataclass(frozen=True)
class Side:
    """The branches of one side of an episode, which is an episode for the estimators.

    A side has a reward of its own, and is compared with the same side of its group's episodes. An
    episode has one side, unless its agent gave a named branch a reward of its own.
    """

    name: str
    # Places of its tokens among the episode's sampled tokens.
    places: npt.NDArray[np.int64]
    # The tokens of each branch among `places`.
    branches: tuple[slice, ...]

    def episode(
        self, group_id: str, reward: float, costs: FloatArray, values: FloatArray | None
    ) -> ScoredEpisode:
        """Returns the side as an episode; `costs` and `values` are the whole episode's."""
        return ScoredEpisode(
            # A group's id has no space.
            f"{group_id} {self.name}" if self.name else group_id,
            reward,
            costs[self.places],
            None if values is None else values[self.places],
            self.branches,
        )


def sides_of(trajectory: Trajectory) -> list[Side]:
    """Returns the sides of an episode, in the order of their first branches."""
    places: dict[str, list[npt.NDArray[np.int64]]] = {}
    for part in trajectory.sequences():
        own = np.arange(part.sampled.start, part.sampled.stop)
        places.setdefault(side_of(part.branch), []).append(own)
    return [
        Side(name, np.concatenate(parts), tuple(itertools.starmap(slice, _bounds(parts))))
        for name, parts in places.items()
    ]


def joined(sides: Sequence[tuple[Side, TokenAdvantages]], num_tokens: int) -> TokenAdvantages:
    """Returns the advantages of an episode's sampled tokens from those of its sides."""
    advantages = np.zeros(num_tokens)
    returns = None if sides[0][1].returns is None else np.zeros(num_tokens)
    for side, found in sides:
        advantages[side.places] = found.advantages
        if returns is not None and found.returns is not None:
            returns[side.places] = found.returns
    return TokenAdvantages(advantages, returns)


def _bounds(parts: Sequence[Sized]) -> Iterator[tuple[int, int]]:
    """Returns start and end of each of the joined parts."""
    return itertools.pairwise([0, *itertools.accumulate(map(len, parts))])
