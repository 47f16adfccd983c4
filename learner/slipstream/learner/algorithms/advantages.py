"""The built-in advantage estimators: pure functions that compute in float64.

Sequence-level estimators give one number for each episode, token-level estimators one for each
sampled token. Only sampled tokens are steps: the context between the replies of an episode is
skipped. Each branch is a separate sequence of steps, which ends with the episode's reward. The
score of an episode is its reward less the costs of its tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, TokenAdvantages

STD_EPS = 1e-6


def grpo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less its group's mean, divided by the group's standard deviation.

    Source: GRPO (arXiv:2402.03300).
    """
    return _group_advantages(episodes, normalize_by_std=True)


def dr_grpo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less its group's mean.

    Source: Dr. GRPO (arXiv:2503.20783), which shows that dividing by the standard deviation favours
    tasks that are nearly always or nearly never solved.
    """
    return _group_advantages(episodes, normalize_by_std=False)


def rloo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less the mean of the other scores of its group; 0 for a group of 1.

    Source: RLOO (arXiv:2402.14740). The result is n / (n - 1) times (score - group's mean).
    """
    scores = episode_scores(episodes)
    advantages = np.zeros(len(scores), dtype=np.float64)
    for members in _groups(episodes):
        number = int(members.sum())
        if number > 1:
            others = (scores[members].sum() - scores[members]) / (number - 1)
            advantages[members] = scores[members] - others
    return advantages


def reinforce_pp(episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    """Returns the undiscounted return (return-to-go) of each token, whitened over the batch.

    Source: REINFORCE++ (arXiv:2501.03262), which normalises over the global batch instead of within
    groups.
    """
    returns = []
    for episode in episodes:
        rewards = episode.token_rewards()
        returns.append(np.concatenate([returns_to_go(rewards[b]) for b in episode.branches]))
    return whitened(returns)


def reinforce_pp_baseline(episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    """Returns for each token its episode's score less the group's mean, whitened over the batch."""
    pairs = zip(dr_grpo(episodes), episodes, strict=True)
    return whitened([np.repeat(centred, len(episode.token_costs)) for centred, episode in pairs])


def gae(
    episodes: Sequence[ScoredEpisode],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize: bool = True,
) -> list[TokenAdvantages]:
    """Returns generalised advantage estimates and the critic's targets for each episode.

    `estimates` has the formula. With `normalize` the advantages are whitened over the batch. Every
    episode must have `values`.
    """
    advantages, returns = [], []
    for episode in episodes:
        assert episode.values is not None, "gae needs the values of a critic"
        rewards, values = episode.token_rewards(), episode.values
        found = [
            estimates(rewards[branch], values[branch], gamma=gamma, lam=lam)
            for branch in episode.branches
        ]
        advantages.append(np.concatenate([one[0] for one in found]))
        returns.append(np.concatenate([one[1] for one in found]))
    if normalize:
        advantages = whitened(advantages)
    return [TokenAdvantages(a, r) for a, r in zip(advantages, returns, strict=True)]


def score(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns the score of each episode: its reward less the costs of its tokens."""
    return episode_scores(episodes)


def none(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns 0 for each episode."""
    return np.zeros(len(episodes))


def episode_scores(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns the reward of each episode, less the costs of its tokens."""
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    if not episodes:
        return rewards
    costs = np.concatenate([episode.token_costs for episode in episodes])
    places = np.repeat(np.arange(len(episodes)), [len(e.token_costs) for e in episodes])
    return rewards - np.bincount(places, weights=costs, minlength=len(episodes))


def returns_to_go(rewards: FloatArray) -> FloatArray:
    """Returns for each token the sum of its own and all later rewards, [tokens]."""
    return np.cumsum(rewards[::-1])[::-1]


def whitened(values: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns `values` scaled to mean 0 and standard deviation 1 over all tokens of the batch.

    If all values are equal, the results are 0. Source: REINFORCE++ (arXiv:2501.03262), which
    normalises over the global batch instead of within groups.
    """
    joined = np.concatenate(list(values)) if values else np.zeros(0)
    if not joined.size:
        return list(values)
    mean = joined.mean()
    deviation = np.sqrt(np.mean((joined - mean) ** 2))
    return [(array - mean) / (deviation + STD_EPS) for array in values]


def estimates(
    rewards: FloatArray, values: FloatArray, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """Returns advantages and returns (advantage + value) of one branch, both [sampled tokens].

    With d(t) = r(t) + gamma * V(t + 1) - V(t) and V = 0 after the last token, the advantage is
    A(t) = d(t) + gamma * lam * A(t + 1). An episode that was cut at a limit ends like any other,
    because its environment has judged it. Source: generalised advantage estimation
    (arXiv:1506.02438), as in PPO (arXiv:1707.06347).
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    following_value, following_advantage = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        advantages[t] = following_advantage
        following_value = values[t]
    return advantages, advantages + values


def _group_advantages(episodes: Sequence[ScoredEpisode], *, normalize_by_std: bool) -> FloatArray:
    """Returns each score less its group's mean, divided by the deviation if `normalize_by_std`.

    The divisor is the population standard deviation of the group, plus `STD_EPS`.
    """
    scores = episode_scores(episodes)
    advantages = np.zeros(len(scores), dtype=np.float64)
    for members in _groups(episodes):
        centred = scores[members] - scores[members].mean()
        if normalize_by_std:
            centred = centred / (np.sqrt(np.mean(centred**2)) + STD_EPS)
        advantages[members] = centred
    return advantages


def _groups(episodes: Sequence[ScoredEpisode]) -> list[npt.NDArray[np.bool_]]:
    """Returns the mask of each group's members, in the order in which groups first appear."""
    group_ids = [episode.group_id for episode in episodes]
    ids = np.asarray(group_ids)
    return [ids == group_id for group_id in dict.fromkeys(group_ids)]
