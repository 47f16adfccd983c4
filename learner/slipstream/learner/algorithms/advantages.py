"""The built-in advantage estimators, pure functions in float64, and how they are called.

Sequence-level estimators give one number for each episode, turn-level estimators one for each
reply, token-level estimators one for each sampled token. Only sampled tokens are steps: the context
between the replies of an episode is skipped. Each branch is a separate sequence of steps. The score
of an episode is its reward less the costs of its tokens.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode, TokenAdvantages
from slipstream.learner.algorithms.functions import function_of

STD_EPS = 1e-6


def grpo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less its group's mean, over its deviation: GRPO (arXiv:2402.03300)."""
    advantages = dr_grpo(episodes)
    for members in _groups(episodes):
        centred = advantages[members]
        advantages[members] = centred / (np.sqrt(np.mean(centred**2)) + STD_EPS)
    return advantages


def dr_grpo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less its group's mean.

    Source: Dr. GRPO (arXiv:2503.20783), which shows that dividing by the standard deviation favours
    tasks that are nearly always or nearly never solved.
    """
    advantages = score(episodes)
    for members in _groups(episodes):
        advantages[members] -= advantages[members].mean()
    return advantages


def rloo(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns each score less the mean of the other scores of its group; 0 for a group of 1.

    Source: RLOO (arXiv:2402.14740). The result is n / (n - 1) times (score - group's mean).
    """
    scores = score(episodes)
    advantages = np.zeros(len(scores), dtype=np.float64)
    for members in _groups(episodes):
        number = len(members)
        if number > 1:
            mean_of_others = (scores[members].sum() - scores[members]) / (number - 1)
            advantages[members] = scores[members] - mean_of_others
    return advantages


def reinforce_pp(episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    """Returns the undiscounted return (return-to-go) of each token, whitened over the batch.

    Source: REINFORCE++ (arXiv:2501.03262), which normalises over the global batch instead of within
    groups.
    """
    return whitened([episode.returns() for episode in episodes])


def reinforce_pp_baseline(episodes: Sequence[ScoredEpisode]) -> list[FloatArray]:
    """Returns for each token its episode's score less the group's mean, whitened over the batch."""
    pairs = zip(dr_grpo(episodes), episodes, strict=True)
    return whitened([np.repeat(centred, len(episode.token_costs)) for centred, episode in pairs])


def return_to_go(
    episodes: Sequence[ScoredEpisode], *, gamma: float = 1.0, normalize: bool = True
) -> list[FloatArray]:
    """Returns the discounted return of each token less the group's mean of its turn.

    The mean is of the returns of the turns with the same number in the episodes of the group. With
    `normalize` the difference is divided by their standard deviation. `ScoredEpisode.returns` has
    the returns, which are equal in a turn whose reward is one number. In an episode of one turn the
    result is that of GRPO. Source: REINFORCE with reward-to-go and a baseline (Williams 1992).
    """
    returns = [episode.returns(gamma) for episode in episodes]
    spans = [list(itertools.chain(*episode.spans())) for episode in episodes]
    first_returns: dict[tuple[str, int], list[float]] = defaultdict(list)
    for episode, values, turns in zip(episodes, returns, spans, strict=True):
        for turn, span in enumerate(turns):
            first_returns[episode.group_id, turn] += values[span][:1].tolist()
    baselines = {
        key: (np.mean(turn_returns), np.std(turn_returns))
        for key, turn_returns in first_returns.items()
        if turn_returns
    }
    for episode, values, turns in zip(episodes, returns, spans, strict=True):
        for turn, span in enumerate(turns):
            mean, deviation = baselines.get((episode.group_id, turn), (0.0, 0.0))
            values[span] -= mean
            if normalize:
                values[span] /= deviation + STD_EPS
    return returns


def gae(
    episodes: Sequence[ScoredEpisode],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize: bool = True,
) -> list[TokenAdvantages]:
    """Returns generalised advantage estimates and the critic's targets for each episode.

    Each sampled token is a step; `estimates` has the formula. With `normalize` the advantages are
    whitened over the batch. Every episode must have `values`.
    """
    assert all(episode.values is not None for episode in episodes), "gae needs values of a critic"
    steps = [[range(*b.indices(len(e.token_costs))) for b in e.branches] for e in episodes]
    return _generalised(episodes, steps, gamma=gamma, lam=lam, normalize=normalize)


def turn_gae(
    episodes: Sequence[ScoredEpisode],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize: bool = True,
) -> list[TokenAdvantages]:
    """Returns the estimates of `gae` with each turn as one step, whose tokens share the advantage.

    The value of a turn is the critic's estimate before its first token, and 0 without a critic.
    """
    steps = [[[span.start for span in spans] for spans in e.spans()] for e in episodes]
    return _generalised(episodes, steps, gamma=gamma, lam=lam, normalize=normalize)


def _generalised(
    episodes: Sequence[ScoredEpisode],
    steps: Sequence[Sequence[Sequence[int]]],
    *,
    gamma: float,
    lam: float,
    normalize: bool,
) -> list[TokenAdvantages]:
    """Returns the estimates; `steps` has the first token of each step of each branch."""
    advantages = []
    returns = []
    for episode, branches in zip(episodes, steps, strict=True):
        rewards = episode.token_rewards()
        values = np.zeros_like(rewards) if episode.values is None else episode.values
        both = np.zeros((2, len(rewards)))
        for branch, starts in zip(episode.branches, branches, strict=True):
            first, stop, _ = branch.indices(len(rewards))
            if first == stop:
                continue
            lengths = np.diff([*starts, stop])
            earned = np.add.reduceat(rewards[:stop], starts)
            worths = estimates(earned, values[np.asarray(starts)], gamma=gamma, lam=lam)
            both[:, first:stop] = np.repeat(worths, lengths, axis=1)
        advantages.append(both[0])
        returns.append(both[1])
    if normalize:
        advantages = whitened(advantages)
    pairs = zip(advantages, returns, episodes, strict=True)
    return [TokenAdvantages(a, None if e.values is None else r) for a, r, e in pairs]


def none(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns 0 for each episode."""
    return np.zeros(len(episodes))


def score(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns the score of each episode: its reward less the costs of its tokens."""
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    if not episodes:
        return rewards
    costs = np.concatenate([episode.token_costs for episode in episodes])
    places = np.repeat(np.arange(len(episodes)), [len(e.token_costs) for e in episodes])
    return rewards - np.bincount(places, weights=costs, minlength=len(episodes))


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
    """Returns advantages and returns (advantage + value) of one branch, both [steps].

    With d(t) = r(t) + gamma * V(t + 1) - V(t) and V = 0 after the last step, the advantage is
    A(t) = d(t) + gamma * lam * A(t + 1). An episode that was cut at a limit ends like any other,
    because its environment has judged it. Source: generalised advantage estimation
    (arXiv:1506.02438), as in PPO (arXiv:1707.06347).
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    following_value = 0.0
    following_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        following_advantage = delta + gamma * lam * following_advantage
        advantages[t] = following_advantage
        following_value = values[t]
    return advantages, advantages + values


def _groups(episodes: Sequence[ScoredEpisode]) -> list[npt.NDArray[np.int64]]:
    """Returns the places of each group's members, in the order in which groups first appear."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, episode in enumerate(episodes):
        places[episode.group_id].append(place)
    return [np.array(members) for members in places.values()]


def token_advantages(
    algorithm: AlgorithmSection, episodes: Sequence[ScoredEpisode], *, where: str
) -> list[TokenAdvantages]:
    """Returns the advantages of all sampled tokens of a batch, by `algorithm.advantage`.

    `episodes` must contain only episodes that count in their group's statistics; their arrays
    become read-only. Raises RunFailed if the function is faulty. A non-finite advantage is a fault
    only of a user's own function, because a built-in one gets it from non-finite rewards.
    """
    function = function_of(algorithm, "advantage")
    for episode in episodes:
        inputs: list[np.ndarray[Any, Any] | None] = [
            episode.token_costs,
            episode.values,
            episode.lags,
            episode.earned,
        ]
        for turn in episode.turns:
            inputs.append(turn.context)
            inputs.append(turn.reply)
        for array in inputs:
            if array is not None:
                array.flags.writeable = False
    with function.named(where):
        results = function.call(tuple(episodes))
        if len(results) != len(episodes):
            raise function.fault(f"{len(results)} advantages of {len(episodes)} episodes", where)
        estimated = []
        for estimate, episode in zip(results, episodes, strict=True):
            number = len(episode.token_costs)
            at = f"{where}, group {episode.group_id}"
            if not isinstance(estimate, TokenAdvantages):
                estimate = TokenAdvantages(np.asarray(estimate, dtype=np.float64))
                if not estimate.advantages.shape:
                    estimate = TokenAdvantages(np.repeat(estimate.advantages, number))
            function.check_numbers(estimate.reports, at)
            arrays = [estimate.advantages]
            if estimate.returns is not None:
                arrays.append(estimate.returns)
            for array in arrays:
                if array.shape != (number,):
                    raise function.fault(f"shape {array.shape} for {number} sampled tokens", at)
                if function.is_own and not np.isfinite(array).all():
                    raise function.fault("a value is not finite", at)
            if episode.values is not None and estimate.returns is None:
                raise function.fault("a critic needs TokenAdvantages with returns", at)
            estimated.append(estimate)
        return estimated
