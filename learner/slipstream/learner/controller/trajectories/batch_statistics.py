"""What is told of the trajectories of a batch: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slipstream.protocol.types import Status, Trajectory


def batch_statistics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards, lengths and times of the episodes; docs/metrics.md says what each name means."""
    rewards = [t.reward for t in trajectories]
    sizes = [len(t.token_ids) for t in trajectories]
    replies = [length for t in trajectories for length in t.run_lengths[1::2]]
    return {
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "prompt_tokens_mean": statistics.fmean(t.run_lengths[0] for t in trajectories),
        "reply_tokens_max": float(max(replies, default=0)),
        "episode_tokens_mean": statistics.fmean(sizes),
        "episode_tokens_max": float(max(sizes)),
        "turns_mean": statistics.fmean(t.num_turns for t in trajectories),
        "truncated_fraction": statistics.fmean(t.status is Status.TRUNCATED for t in trajectories),
        "generation_s_mean": statistics.fmean(t.generation_s for t in trajectories),
        "environment_s_mean": statistics.fmean(t.environment_s for t in trajectories),
    }


def environment_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward, and mean of each metric, of the episodes of each environment."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        measured = {**trajectory.metrics, "reward": trajectory.reward}
        for name, value in measured.items():
            values.setdefault(f"{trajectory.environment}/{name}", []).append(value)
    return {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}
