"""What makes a decoded trajectory unfit for training: pure functions, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from slipstream.learner.controller.leasing.groups import Group, ServerKey
from slipstream.protocol.types import PolicyVersion, Purpose, Trajectory

# What rounding may make of the logarithm of a probability of 1.
LARGEST_LOGPROB = 1e-3


@dataclass(frozen=True)
class KnownFacts:
    """What the controller knows of the run, for a comparison with what a trajectory says."""

    servers: Set[ServerKey]
    # The newest version that was made, of the newest timeline.
    newest: PolicyVersion
    # Number of token ids; 0: unknown.
    vocabulary: int
    max_staleness: int


def contradiction(trajectory: Trajectory, group: Group | None, facts: KnownFacts) -> str:
    """Why the trajectory cannot be what it says; empty: nothing speaks against it.

    `group` is the lease that it names; None: it is over.
    """
    key = ServerKey(trajectory.server_id, trajectory.server_epoch)
    if key not in facts.servers:
        return f"no rollout server {key.server_id} ever had the epoch {key.epoch:x}"
    newest = facts.newest
    for span in trajectory.version_spans:
        if span.version.step > newest.step or span.version.incarnation > newest.incarnation:
            return f"version {span.version} sampled it, the newest is {newest}"
    if facts.vocabulary and trajectory.token_ids.size:
        largest = int(trajectory.token_ids.max())
        if largest >= facts.vocabulary:
            return f"token {largest} is outside the vocabulary of {facts.vocabulary}"
    logprobs = trajectory.behavior_logprobs
    if logprobs.size and not bool(np.all(logprobs <= LARGEST_LOGPROB)):
        return f"a log-probability is {float(logprobs.max())}, above 0"
    return "" if group is None else _misfit(trajectory, group, facts.max_staleness)


def _misfit(trajectory: Trajectory, group: Group, max_staleness: int) -> str:
    said = (trajectory.environment, trajectory.task_index, trajectory.seed, trajectory.purpose)
    if said != (group.environment, group.task_index, group.seed, group.purpose):
        return f"it is about another task than {group.group_id} was leased for"
    if trajectory.member >= group.size:
        return f"{group.group_id} has {group.size} members, not a member {trajectory.member}"
    oldest = min((span.version.step for span in trajectory.version_spans), default=None)
    if oldest is None or group.purpose is not Purpose.TRAINING:
        return ""
    if group.deadline_step - oldest > max_staleness:
        return (
            f"version {oldest} sampled a token that step {group.deadline_step + 1} may train, "
            f"max_staleness is {max_staleness}"
        )
    return ""
