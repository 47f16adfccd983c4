"""What is told of the trajectories of a batch: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from slipstream.protocol.rewards import has_variance
from slipstream.protocol.settings.algorithm_section import AdvantageKind
from slipstream.protocol.settings.config import Config
from slipstream.protocol.types import Status, Trajectory

# These compare the episodes of a group with each other alone: without a difference they are all 0.
_GROUP_ADVANTAGES: tuple[AdvantageKind, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
_EQUAL = "equal_rewards_fraction"
# A hard task may leave a few steps without a lesson; so many in a row are worth a word.
HINT_AFTER_STEPS = 10


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


def equal_rewards(groups: Sequence[Sequence[Trajectory]], config: Config) -> dict[str, float]:
    """Fraction of `groups` without two different rewards, in all and of each environment.

    Penalties are part of the reward, and filtered episodes do not count.
    """
    found: dict[str, list[bool]] = {}
    for group in groups:
        is_equal = not has_variance(group, config)
        found.setdefault(group[0].environment, []).append(is_equal)
    return {
        _EQUAL: statistics.fmean(is_equal for each in found.values() for is_equal in each),
        **{f"{name}/{_EQUAL}": statistics.fmean(each) for name, each in sorted(found.items())},
    }


def hints(rows: Sequence[Mapping[str, float]], config: Config) -> list[str]:
    """One line for each environment that has just now taught nothing for `HINT_AFTER_STEPS` steps.

    `rows`: what metrics.jsonl has of the steps so far, in their order.
    """
    if config.algorithm.advantage not in _GROUP_ADVANTAGES:
        return []
    ending = f"/{_EQUAL}"
    names = [key.removesuffix(ending) for key in rows[-1] if key.endswith(ending)]
    return [
        f"environment {name} has taught nothing for {HINT_AFTER_STEPS} steps: the rewards of each "
        f"group were all equal (mean {rows[-1][f'{name}/reward']:.3g}); it needs tasks of another "
        f"difficulty, or rewards in between"
        for name in names
        if _equal_in_a_row(rows, name + ending) == HINT_AFTER_STEPS
    ]


def _equal_in_a_row(rows: Sequence[Mapping[str, float]], key: str) -> int:
    """Number of the newest steps with `key` in which it was 1, counted no further than needed."""
    number = 0
    for row in reversed(rows):
        if key in row and row[key] < 1:
            break
        number += key in row
        if number > HINT_AFTER_STEPS:
            break
    return number
