"""Rules that a decoded trajectory must keep to be trained: pure functions, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from slipstream.core.reservation import max_text_bytes
from slipstream.core.types import PolicyVersion, Purpose, Trajectory
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.server_states import ServerKey

# Largest logarithm of a probability of 1 after rounding.
LARGEST_LOGPROB = 1e-3


@dataclass(frozen=True)
class KnownFacts:
    """The controller's facts with which a trajectory is compared."""

    servers: Container[ServerKey]
    # The newest timeline, with the step of the run's version.
    newest: PolicyVersion
    # Number of token ids; 0: unknown.
    vocabulary: int
    max_staleness: int
    # Largest sizes of an episode that leases allow: of each branch, and of all together.
    max_episode_tokens: int
    max_total_tokens: int
    max_branches: int
    max_turns: int
    max_images: int
    max_image_bytes: int
    # Likely tokens that the reference's server gives; None: no server answers for a reference.
    reference_top_k: int | None = None


def contradiction(trajectory: Trajectory, group: Group | None, facts: KnownFacts) -> str:
    """The reason why the trajectory is invalid; empty: no rule is broken.

    `group` is the group that the trajectory names; None: that group is not in the lease book.
    """
    key = ServerKey(trajectory.server_id, trajectory.server_epoch)
    if key not in facts.servers:
        return f"no rollout server {key.server_id} ever had the epoch {key.epoch:x}"
    newest = facts.newest
    for span in trajectory.version_spans:
        if span.version.step > newest.step or span.version.incarnation > newest.incarnation:
            return f"version {span.version} sampled it, the newest is {newest}"
    if facts.vocabulary and trajectory.token_ids.size:
        largest = int(np.maximum.reduce(trajectory.token_ids))
        if largest >= facts.vocabulary:
            return f"token {largest} is outside the vocabulary of {facts.vocabulary}"
    logprobs = trajectory.behavior_logprobs
    # The ufuncs themselves: the functions around them take as long again for an episode.
    if logprobs.size and not (highest := float(np.maximum.reduce(logprobs))) <= LARGEST_LOGPROB:
        return f"a log-probability is {highest}, above 0"
    if fault := _excess(trajectory, facts) or _reference_fault(trajectory, facts):
        return fault
    return "" if group is None else _misfit(trajectory, group, facts.max_staleness)


def _excess(trajectory: Trajectory, facts: KnownFacts) -> str:
    """The reason why no episode of this run can have this size; empty: it can."""
    size, most = len(trajectory.token_ids), facts.max_episode_tokens
    if trajectory.branches:
        if excess := _excess_of_branches(trajectory, facts):
            return excess
    elif size > most:
        return f"it has {size} tokens, sampling.max_episode_tokens is {most}"
    turns = max(trajectory.num_turns, len(trajectory.run_lengths) // 2)
    if turns > facts.max_turns:
        return f"it has {turns} turns, sampling.max_turns is {facts.max_turns}"
    if trajectory.has_reward and trajectory.num_sampled_tokens == 0:
        return "it has a reward and no sampled token"
    number, most = len(trajectory.images), facts.max_images
    if number > most:
        return f"it has {number} images, sampling.max_images is {most}"
    largest, most = max(map(len, trajectory.images), default=0), facts.max_image_bytes
    if largest > most:
        return f"it has an image of {largest} bytes, sampling.max_image_bytes is {most}"
    for name, text in (("prompt", trajectory.prompt_text), ("reply", trajectory.reply_text)):
        allowed = max_text_bytes(size)
        if len(text) > allowed or len(text.encode()) > allowed:
            return f"its {name}'s text has more than the {allowed} bytes that {size} tokens allow"
    return ""


def _excess_of_branches(trajectory: Trajectory, facts: KnownFacts) -> str:
    """The reason why no episode of this run can have these branches; empty: it can."""
    number, most = len(trajectory.branches), facts.max_branches
    if number > most:
        return f"it has {number} branches, sampling.max_branches is {most}"
    most = facts.max_episode_tokens
    for place, part in enumerate(trajectory.sequences(), 1):
        size = part.tokens.stop - part.tokens.start
        if size > most:
            return f"branch {place} has {size} tokens, sampling.max_episode_tokens is {most}"
        if trajectory.has_reward and part.sampled.start == part.sampled.stop:
            return f"branch {place} has no sampled token"
    size, most = len(trajectory.token_ids), facts.max_total_tokens
    if size > most:
        return f"its branches have {size} tokens, sampling.max_total_tokens is {most}"
    return ""


def _reference_fault(trajectory: Trajectory, facts: KnownFacts) -> str:
    """The reason why the reference's log-probabilities are not those of this run; empty: none."""
    found, top_k = trajectory.reference, facts.reference_top_k
    if found is None:
        is_trained = trajectory.purpose is Purpose.TRAINING and trajectory.has_reward
        lacks = is_trained and top_k is not None
        return "it lacks the log-probabilities of reference.server" if lacks else ""
    if found.top_k != top_k:
        return (
            f"it has {found.top_k} likely tokens of a reference, "
            f"reference.top_k is {'not set' if top_k is None else top_k}"
        )
    largest = int(found.top_ids.max(initial=0))
    if facts.vocabulary and largest >= facts.vocabulary:
        return f"token {largest} of its reference is outside the vocabulary of {facts.vocabulary}"
    return ""


def _misfit(trajectory: Trajectory, group: Group, max_staleness: int) -> str:
    """The reason why the trajectory is not one that a lease of the group allows; empty: it is."""
    task = (trajectory.environment, trajectory.task_index, trajectory.seed, trajectory.purpose)
    if task != (group.environment, group.task_index, group.seed, group.purpose):
        return f"it is about another task than {group.group_id} was leased for"
    if trajectory.member >= group.size:
        return f"{group.group_id} has {group.size} members, not a member {trajectory.member}"
    if excess := group.excess(trajectory.server_epoch, trajectory.attempt):
        return excess
    oldest = min((span.version.step for span in trajectory.version_spans), default=None)
    if oldest is None or group.purpose is not Purpose.TRAINING:
        return ""
    if group.deadline_step - oldest > max_staleness:
        return (
            f"version {oldest} sampled a token that step {group.deadline_step + 1} may train, "
            f"max_staleness is {max_staleness}"
        )
    return ""
