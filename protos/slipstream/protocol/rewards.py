"""Rewards for the trainer and for the filter of groups: pure functions of trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.protocol.settings.algorithm_section import AlgorithmSection
from slipstream.protocol.settings.config import Config
from slipstream.protocol.types import Status, Trajectory


def overlong_penalty(reply_tokens: int, *, limit: int, cache_tokens: int) -> float:
    """Returns 0 up to `limit` - `cache_tokens`, then rises linearly to 1 at `limit` and beyond.

    Source: the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), with opposite sign.
    """
    if cache_tokens == 0:
        return 0.0
    return min(max((reply_tokens - (limit - cache_tokens)) / cache_tokens, 0.0), 1.0)


def shaped_reward(trajectory: Trajectory, algorithm: AlgorithmSection, *, limit: int) -> float:
    """Returns the environment's reward less the penalty for the longest reply.

    `limit` is `sampling.max_reply_tokens`.
    """
    overlong = algorithm.overlong
    if not overlong.penalty:
        return trajectory.reward
    share = overlong_penalty(
        max(trajectory.run_lengths[1::2], default=0),
        limit=limit,
        cache_tokens=overlong.cache_tokens,
    )
    return trajectory.reward - overlong.penalty * share


def is_counted(trajectory: Trajectory, algorithm: AlgorithmSection) -> bool:
    """Whether overlong filtering keeps the episode in the loss and in its group's statistics.

    Source: overlong filtering of DAPO (arXiv:2503.14476, section 3.4).
    """
    return not (algorithm.overlong.filter and trajectory.status is Status.TRUNCATED)


def has_variance(group: Sequence[Trajectory], config: Config) -> bool:
    """Whether two counted episodes of a group have different rewards, penalties included.

    Source: dynamic sampling of DAPO (arXiv:2503.14476, section 3.2), which leaves out groups of
    equal rewards.
    """
    if not group:
        return False
    algorithm = config.algorithm_of(group[0].environment)
    rewards = {
        shaped_reward(trajectory, algorithm, limit=config.sampling.max_reply_tokens)
        for trajectory in group
        if is_counted(trajectory, algorithm)
    }
    return len(rewards) > 1
