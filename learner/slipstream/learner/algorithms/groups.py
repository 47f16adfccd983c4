"""Converts groups of trajectories to the inputs of an algorithm's functions: pure functions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, Status, Trajectory
from slipstream.learner.algorithms.episodes import RewardedEpisode
from slipstream.learner.algorithms.functions import filtered, rewarded


def side_of(branch: Branch) -> str:
    """Returns the side of an episode, such as a player of a game, to which a branch belongs.

    Branches with their own reward form one side per branch name; all others are on side "".
    """
    return "" if branch.reward is None else branch.name


def is_counted(trajectory: Trajectory, algorithm: AlgorithmSection) -> bool:
    """Whether the episode counts in the loss and in its group's statistics.

    With `leave_out_truncated`, truncated episodes do not count. Source: overlong filtering of DAPO
    (arXiv:2503.14476, section 3.4).
    """
    return not (algorithm.leave_out_truncated and trajectory.status is Status.TRUNCATED)


def shaped_rewards(
    trajectories: Sequence[Trajectory], config: Config
) -> list[list[RewardedEpisode]]:
    """Returns a list of sides for each episode, with the rewards that `algorithm.reward` gives.

    The sides are in the order of their first branches. An episode without branches has one side; an
    episode that does not count (`is_counted`) has none. Raises RunFailed if the reward function is
    faulty.
    """
    algorithm, limit, found = config.algorithm, config.sampling.max_reply_tokens, []
    groups: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        sides = _sides(trajectory, limit) if is_counted(trajectory, algorithm) else []
        for place, side in enumerate(sides):
            groups[trajectory.group_id, side.side].append((index, place))
        found.append(sides)
    for (group_id, _), members in groups.items():
        group = [found[index][place] for index, place in members]
        changed = rewarded(algorithm, group, where=f"group {group_id}")
        for (index, place), episode in zip(members, changed, strict=True):
            found[index][place] = episode
    return found


def is_trained(trajectories: Sequence[Trajectory], config: Config) -> bool:
    """Whether `algorithm.filter` keeps the group of `trajectories`, which must not be empty.

    A filter is never called without an episode: it keeps no group in which none counts, unless it
    keeps all. Raises RunFailed if the reward function or the filter is faulty.
    """
    sides = shaped_rewards(trajectories, config)
    group = [side for episode in sides for side in episode]
    if not group:
        return config.algorithm.filter == "none"
    return filtered(config.algorithm, group, where=f"group {trajectories[0].group_id}")


def _sides(trajectory: Trajectory, limit: int) -> list[RewardedEpisode]:
    rewards: Mapping[str, float | None]
    rewards = {side_of(branch): branch.reward for branch in trajectory.branches} or {"": None}
    return [
        RewardedEpisode(
            trajectory.reward if reward is None else reward,
            trajectory.metrics,
            trajectory.status is Status.TRUNCATED,
            tuple(trajectory.run_lengths[1::2]),
            # The environment may have a lower limit.
            min(limit, trajectory.max_reply_tokens or limit),
            trajectory.environment,
            trajectory.task_index,
            side,
        )
        for side, reward in rewards.items()
    ]
