"""Invariants of a step: what its numbers must keep whatever is trained, and what broke of it.

The functions are pure: they read the settings, the step's row and its groups. Settings that break
an invariant by themselves are refused before a run; these find what no rule has thought of.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.core.environment_rules import PLAIN, environment_rules
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import BANDS
from slipstream.core.types import Trajectory, TrajectoryId
from slipstream.learner.algorithms.functions import is_counted

# Fewer tokens of lag 0 say little: a single one may differ by more than the mean may.
FEWEST_TOKENS = 16
# Largest advantage that counts as 0. Rewards that differ by 1e-12 count as equal, and a deviation
# has 1e-6 added to it.
ZERO_ADVANTAGE = 1e-5


@dataclass(frozen=True)
class Notice:
    """What the user is told of a step, once in a run."""

    # The same in each step that shows the same.
    name: str
    # A line for the user, with the figures.
    text: str
    is_warning: bool = True


def broken_invariants(
    config: Config,
    row: Mapping[str, float],
    groups: Sequence[Sequence[Trajectory]],
    advantages: Mapping[TrajectoryId, float],
) -> Iterator[Notice]:
    """Yields the invariants that a step breaks.

    `row` is the step's row of metrics. `advantages` has the mean advantage of the trained tokens of
    the trajectories of which it is known, by id.
    """
    yield from _of_gaps(config, row)
    yield from _of_weights(config, row)
    yield from _of_filters(config, row, groups)
    yield from _of_advantages(config, row, groups, advantages)


def _of_gaps(config: Config, row: Mapping[str, float]) -> Iterator[Notice]:
    """The engine and the learner agree on tokens that the newest weights sampled."""
    gap = row.get("logprob_gap_mean", math.nan)
    num_tokens = row.get("logprob_gap_tokens", 0.0)
    bound = config.probe_tolerance
    if are_to_agree(config) and num_tokens >= FEWEST_TOKENS and gap > bound:
        yield Notice(
            "gap",
            f"step {row['step']:.0f}: engine and learner give {num_tokens:.0f} tokens that the "
            f"newest weights sampled log-probabilities that differ by {gap:.2g} on average, and "
            f"rounding explains {bound:g}: something changes what is sampled or what is learnt",
        )


def _of_weights(config: Config, row: Mapping[str, float]) -> Iterator[Notice]:
    """Tokens that the newest weights sampled need no correction."""
    algorithm = config.algorithm
    arguments = algorithm.weight_args
    is_masked = bool(BANDS & arguments.keys())
    is_moved = arguments.get("to") == "present" and algorithm.mini_batches * algorithm.epochs > 1
    if algorithm.weight != "token" or is_masked or is_moved or not are_to_agree(config):
        return
    # The mean is over all lags, so it says something of lag 0 where there is no other.
    weight = row.get("importance_weight_mean", math.nan)
    is_fresh = row.get("lag_max", math.inf) == 0.0
    bound = math.expm1(config.probe_tolerance)
    if is_fresh and row.get("trained_tokens", 0.0) >= FEWEST_TOKENS and abs(weight - 1.0) > bound:
        yield Notice(
            "weight",
            f"step {row['step']:.0f}: tokens that the newest weights sampled have the importance "
            f"weight {weight:.3g} on average, not 1: the engine does not sample from the "
            "distribution that the learner trains",
        )


def _of_filters(
    config: Config, row: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]
) -> Iterator[Notice]:
    """The filter has seen what a user would call the reward."""
    num_equal = sum(_has_equal_rewards(group, config) for group in groups)
    fraction = num_equal / len(groups) if groups else row.get("equal_rewards_fraction", 0.0)
    if config.algorithm.filter == "unequal_rewards" and fraction > 0.0:
        yield Notice(
            "filter",
            f"step {row['step']:.0f}: {fraction:.0%} of the groups have equal rewards although "
            "algorithm.filter = 'unequal_rewards' leaves such groups out",
        )


def _of_advantages(
    config: Config,
    row: Mapping[str, float],
    groups: Sequence[Sequence[Trajectory]],
    advantages: Mapping[TrajectoryId, float],
) -> Iterator[Notice]:
    """Groups of equal rewards teach nothing where the estimator compares groups."""
    algorithm = config.algorithm
    if algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward":
        # Tokens have costs of their own.
        return
    largest = 0.0
    num_groups = 0
    rules = environment_rules(config)
    names: list[str] = []
    for group in groups:
        rules_of_group = rules.get(group[0].environment, PLAIN)
        estimating = rules_of_group.algorithm or algorithm
        estimator = estimating.estimator
        if estimator is None or not estimator.compares_only_groups:
            continue
        if not estimator.sums_turns and any(member.token_rewards is not None for member in group):
            # Equal sums may have been earned in other turns.
            continue
        values = (advantages.get(member.trajectory_id, math.nan) for member in group)
        group_largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        if group_largest > ZERO_ADVANTAGE and _has_equal_rewards(group, config):
            largest = max(largest, group_largest)
            num_groups += 1
            names.append(estimating.advantage)
    if not num_groups:
        return
    if algorithm.reward == "none":
        cause = f"although advantage = {names[0]!r} gives them none"
    else:
        cause = (
            f"by algorithm.reward = {algorithm.reward!r} alone: they train what it adds, and "
            "algorithm.filter = 'unequal_rewards' would leave them out"
        )
    yield Notice(
        "advantage",
        f"step {row['step']:.0f}: {num_groups} of {len(groups)} groups have equal rewards and "
        f"advantages up to {largest:.2g}, {cause}",
    )


def _has_equal_rewards(group: Sequence[Trajectory], config: Config) -> bool:
    """Whether the environment's rewards are equal; by itself, as filters are what is watched."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in group:
        if not is_counted(trajectory, config.algorithm):
            continue
        rewards[""].append(trajectory.reward)
        for branch in trajectory.branches:
            if branch.reward is not None:
                rewards[branch.name].append(branch.reward)
    return all(math.isclose(min(side), max(side), abs_tol=1e-12) for side in rewards.values())


def are_to_agree(config: Config) -> bool:
    """Whether engine and learner are to agree on the probability of a token of lag 0."""
    if not config.rollout_server.recompute_context:
        # A reply may go on with keys and values of older weights.
        return False
    if not config.sampling.cuts or config.replays_sampling:
        return True
    return bool(config.algorithm.behavior_ratios)
