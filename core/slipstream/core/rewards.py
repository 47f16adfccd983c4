"""Rewards for the trainer and for the filter of groups: pure functions of trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, Status, Trajectory


def overlong_penalty(reply_tokens: int, *, limit: int, cache_tokens: int) -> float:
    """Returns 0 up to `limit` - `cache_tokens`, then rises linearly to 1 at `limit` and beyond.

    Source: the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), with opposite sign.
    """
    if cache_tokens == 0:
        return 0.0
    return min(max((reply_tokens - (limit - cache_tokens)) / cache_tokens, 0.0), 1.0)


def side_of(branch: Branch) -> str:
    """Returns the side of an episode that a branch is on.

    All branches of a name with a reward of its own are one side; "" is all others.
    """
    return "" if branch.reward is None else branch.name


def shaped_rewards(
    trajectory: Trajectory, algorithm: AlgorithmSection, *, limit: int
) -> dict[str, float]:
    """Returns the reward of each side less the penalty for the episode's longest reply.

    `limit` is `sampling.max_reply_tokens`; the environment may have a lower one. The sides are in
    the order of their first branches; an episode without branches is one side.
    """
    overlong, penalty = algorithm.overlong, 0.0
    limit = min(limit, trajectory.max_reply_tokens or limit)
    if overlong.penalty:
        penalty = overlong.penalty * overlong_penalty(
            max(trajectory.run_lengths[1::2], default=0),
            limit=limit,
            cache_tokens=min(overlong.cache_tokens, limit),
        )
    sides = {side_of(branch): branch.reward for branch in trajectory.branches} or {"": None}
    return {
        side: (trajectory.reward if reward is None else reward) - penalty
        for side, reward in sides.items()
    }


def is_counted(trajectory: Trajectory, algorithm: AlgorithmSection) -> bool:
    """Whether overlong filtering keeps the episode in the loss and in its group's statistics.

    Source: overlong filtering of DAPO (arXiv:2503.14476, section 3.4).
    """
    return not (algorithm.overlong.filter and trajectory.status is Status.TRUNCATED)


def has_variance(group: Sequence[Trajectory], config: Config) -> bool:
    """Whether two counted episodes of a group have different rewards on one side of theirs.

    Penalties are included.

    Source: dynamic sampling of DAPO (arXiv:2503.14476, section 3.2), which leaves out groups of
    equal rewards.
    """
    if not group:
        return False
    algorithm = config.algorithm_of(group[0].environment)
    limit = config.sampling.max_reply_tokens
    rewards: dict[str, set[float]] = defaultdict(set)
    for trajectory in group:
        if is_counted(trajectory, algorithm):
            for side, reward in shaped_rewards(trajectory, algorithm, limit=limit).items():
                rewards[side].add(reward)
    return any(len(different) > 1 for different in rewards.values())
