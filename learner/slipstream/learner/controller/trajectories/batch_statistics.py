"""Statistics of the trajectories of a batch.

Only the controller computes them; the trainer reports only statistics of the training.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from slipstream.core.settings.algorithm_section import GROUP_ADVANTAGES
from slipstream.core.settings.config import Config
from slipstream.core.types import BRANCHES, IGNORED, Status, Trajectory
from slipstream.learner.algorithms.filters import unequal_rewards
from slipstream.learner.algorithms.groups import shaped_rewards
from slipstream.learner.controller.trajectories.batch import FormedBatch

# Largest number of named branches of an episode, and of its first turns, whose rewards are metrics.
MOST_BRANCHES, MOST_TURNS = 16, 8
_EQUAL = "equal_rewards_fraction"
# Steps in a row without a lesson after which a hint is due; fewer are normal with hard tasks.
HINT_AFTER_STEPS = 10


def batch_statistics(batch: FormedBatch) -> dict[str, float]:
    """Returns statistics of rewards, lags, lengths and times, by their names in docs/metrics.md.

    Of a step that a client has ordered, it returns the number of passes.
    """
    if batch.given is not None:
        return {"passes": float(len(batch.given.passes))}
    trajectories = batch.trajectories
    lags, num_sampled = batch.token_lags, batch.token_lags.total()
    rewards = [t.reward for t in trajectories]
    sizes = [len(t.token_ids) for t in trajectories]
    replies = [length for t in trajectories for length in t.run_lengths[1::2]]
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(1, num_sampled),
        "lag_max": float(max(lags, default=0)),
        "trajectories_with_several_versions": float(batch.num_with_several_versions),
        "num_tokens": float(sum(sizes)),
        "prompt_tokens_mean": statistics.fmean(t.run_lengths[0] for t in trajectories),
        "reply_tokens_mean": num_sampled / max(1, len(replies)),
        "reply_tokens_max": float(max(replies, default=0)),
        "episode_tokens_mean": statistics.fmean(sizes),
        "episode_tokens_max": float(max(sizes)),
        "turns_mean": statistics.fmean(t.num_turns for t in trajectories),
        "branches_mean": statistics.fmean(len(t.sequences()) for t in trajectories),
        "truncated_fraction": statistics.fmean(t.status is Status.TRUNCATED for t in trajectories),
        "generation_s_mean": statistics.fmean(t.generation_s for t in trajectories),
        "environment_s_mean": statistics.fmean(t.environment_s for t in trajectories),
    }


def environment_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns means of rewards, of branches' own rewards and of metrics, for each environment.

    In an environment of several turns there are those of its first turns' rewards, too.
    """
    episodes: dict[str, list[Mapping[str, float]]] = {}
    of_turns = [trajectory.turn_rewards()[:MOST_TURNS] for trajectory in trajectories]
    several = {t.environment for t, turns in zip(trajectories, of_turns, strict=True) if turns[1:]}
    for trajectory, turns in zip(trajectories, of_turns, strict=True):
        measured = {**_branch_rewards(trajectory), **trajectory.metrics}
        if trajectory.environment in several:
            measured |= {f"turn_rewards/{n}": reward for n, reward in enumerate(turns, 1)}
        measured["reward"] = trajectory.reward
        episodes.setdefault(trajectory.environment, []).append(measured)
    return {
        f"{environment}/{name}": mean
        for environment, measured in sorted(episodes.items())
        for name, mean in means_of_metrics(measured).items()
    }


def _branch_rewards(trajectory: Trajectory) -> dict[str, float]:
    """Returns the rewards of named branches with their own reward, at most `MOST_BRANCHES`."""
    rewards = {b.name: b.reward for b in trajectory.branches if b.name and b.reward is not None}
    return {f"branch_rewards/{name}": rewards[name] for name in sorted(rewards)[:MOST_BRANCHES]}


def means_of_metrics(episodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the `episodes` that have it.

    The mean of a count of branches or of ignored settings is over all `episodes`.
    """
    values: dict[str, list[float]] = {}
    for name, value in (item for each in episodes for item in each.items()):
        values.setdefault(name, []).append(value)
    return {
        name: sum(numbers) / len(episodes)
        if name.startswith((BRANCHES, IGNORED))
        else statistics.fmean(numbers)
        for name, numbers in sorted(values.items())
    }


def equal_rewards(groups: Sequence[Sequence[Trajectory]], config: Config) -> dict[str, float]:
    """Returns the fraction of `groups` with equal rewards, in total and for each environment.

    Penalties are part of the reward, and filtered episodes do not count.
    """
    found: dict[str, list[bool]] = {}
    for group in groups:
        sides = [side for episode in shaped_rewards(group, config) for side in episode]
        is_equal = not unequal_rewards(sides)
        found.setdefault(group[0].environment, []).append(is_equal)
    return {
        _EQUAL: statistics.fmean(is_equal for each in found.values() for is_equal in each),
        **{f"{name}/{_EQUAL}": statistics.fmean(each) for name, each in sorted(found.items())},
    }


class LessonWatch:
    """Counts for each environment the steps in a row in which its groups had equal rewards.

    watch.note(row)  # []: fewer than HINT_AFTER_STEPS steps in a row had equal rewards
    watch.note(row)  # [hint]: exactly HINT_AFTER_STEPS steps in a row had equal rewards
    watch.note(row)  # []: the hint was given; a step with unequal rewards starts the count again
    """

    def __init__(self, config: Config) -> None:
        self._compares = config.algorithm.advantage in GROUP_ADVANTAGES
        # Steps in a row with equal rewards, by environment.
        self._steps: Counter[str] = Counter()

    def note(self, row: Mapping[str, float]) -> list[str]:
        """Takes the row of one step; returns a hint for each count that is now HINT_AFTER_STEPS."""
        due = []
        for key, fraction in row.items():
            name, slash, metric = key.rpartition("/")
            if not (self._compares and slash and metric == _EQUAL):
                continue
            self._steps[name] = self._steps[name] + 1 if fraction >= 1 else 0
            if self._steps[name] == HINT_AFTER_STEPS:
                mean = row.get(f"{name}/reward", math.nan)
                due.append(
                    f"environment {name} has taught nothing for {HINT_AFTER_STEPS} steps: the "
                    f"rewards of each group were all equal (mean {mean:.3g}); it "
                    f"needs tasks of another difficulty, or rewards in between"
                )
        return due
