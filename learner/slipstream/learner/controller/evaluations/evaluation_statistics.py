"""The statistics of the episodes of one evaluation: pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.types import Status, Trajectory
from slipstream.learner.controller.trajectories.batch_statistics import means_of_metrics


@dataclass(frozen=True)
class EvaluatedEpisode:
    """The facts that an evaluation keeps of one episode with a reward."""

    task_index: int
    reward: float
    # Number of sampled tokens of each reply.
    reply_tokens: tuple[int, ...]
    truncated: bool
    metrics: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, trajectory: Trajectory) -> EvaluatedEpisode:
        """The episode that `trajectory` recorded."""
        return cls(
            task_index=trajectory.task_index,
            reward=trajectory.reward,
            reply_tokens=trajectory.run_lengths[1::2],
            truncated=trajectory.status is Status.TRUNCATED,
            metrics=tuple(trajectory.metrics.items()),
        )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of `k` replies passes, estimated without bias.

    `k` of the `num_samples` replies, of which `num_passed` passed, are drawn without putting back:
    1 - C(n - c, k) / C(n, k), the estimator of arXiv:2107.03374. Needs k <= num_samples.
    """
    assert 0 <= num_passed <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def evaluation_statistics(
    episodes: Sequence[EvaluatedEpisode],
    *,
    num_failed: int,
    pass_at: Sequence[int],
    pass_reward: float,
) -> dict[str, float]:
    """The numbers of one evaluation in one round, by name; docs/metrics.md says what they mean.

    Returns only the counts when there is no episode. `pass_at_k` is the mean over the tasks with at
    least k replies, not counting failed episodes. It is left out when there is no such task.
    """
    counts = {"num_episodes": float(len(episodes)), "num_failed": float(num_failed)}
    if not episodes:
        return counts
    rewards = [episode.reward for episode in episodes]
    replies = [tokens for episode in episodes for tokens in episode.reply_tokens]
    return {
        **means_of_metrics([dict(episode.metrics) for episode in episodes]),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_median": statistics.median(rewards),
        "reply_tokens_mean": statistics.fmean(replies) if replies else 0.0,
        "reply_tokens_max": float(max(replies, default=0)),
        "truncated_fraction": statistics.fmean(episode.truncated for episode in episodes),
        **_pass_rates(episodes, pass_at, pass_reward),
        **counts,
    }


def _pass_rates(
    episodes: Sequence[EvaluatedEpisode], pass_at: Sequence[int], pass_reward: float
) -> dict[str, float]:
    passed: dict[int, list[bool]] = {}
    for episode in episodes:
        passed.setdefault(episode.task_index, []).append(episode.reward >= pass_reward)
    rates = {}
    for k in pass_at:
        estimates = [pass_at_k(len(p), sum(p), k) for p in passed.values() if len(p) >= k]
        if estimates:
            rates[f"pass_at_{k}"] = statistics.fmean(estimates)
    return rates
