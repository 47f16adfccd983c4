"""The verdict of an environment on the finished members of a group, which it compares.

Consumes: ended plays of one lease. Produces: the reward that each of them earns in addition.
Waits for: a worker, and the environment's answer. Unblocked by: the answer, or the environment's
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.types import Status, Trajectory
from slipstream.rollout_server.episodes.calls import check_sum, misused
from slipstream.rollout_server.episodes.environments import Environments
from slipstream.rollout_server.episodes.play import EpisodeAttempt, EpisodeLease
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.v1 import environment_pb2


@dataclass(frozen=True)
class EndedPlay:
    """A play that has ended, and the trajectory of what it did by itself."""

    play: EpisodeAttempt
    trajectory: Trajectory


async def ask_verdicts(
    environments: Environments, lease: EpisodeLease, key: str, ended: Sequence[EndedPlay]
) -> Sequence[environment_pb2.EpisodeVerdict]:
    """Returns the environment's verdict on each of `ended`, in an episode of its own named `key`.

    Raises EnvironmentFailed if the environment fails or does not answer in time, if a sum of
    rewards is out of bounds, or if sides of an episode have rewards.
    """
    episodes = [_finished(ended_play) for ended_play in ended]
    session = await environments.open(lease.environment, key, lease.task_index, lease.timeout_s)
    try:
        await session.reset(lease.task_index, lease.seed)
        verdicts = await session.judge_group(episodes)
    finally:
        session.close()
    for ended_play, verdict in zip(ended, verdicts, strict=True):
        recording = ended_play.play.recording
        if any(branch.reward is not None for branch in recording.branches):
            raise misused("an episode has rewards by branch, to which nothing can be added")
        check_sum(recording.reward + verdict.reward)
    return verdicts


def take_verdict(play: EpisodeAttempt, verdict: environment_pb2.EpisodeVerdict) -> None:
    """Adds a verdict to what the episode earned by itself: at its last token."""
    recording = play.recording
    recording.reward += verdict.reward
    if recording.sampled and "token_rewards" in recording.sampled[-1]:
        recording.earn(-1, verdict.reward)
    recording.metrics.update(verdict.metrics)
    recording.judged_lease = play.lease.first_attempt + 1


def sampled_replies(recording: Recording, renderer: Renderer) -> list[environment_pb2.StepCommand]:
    """Returns the replies to an agent, read from their tokens."""
    replies = []
    start = 0
    for run, length in enumerate(recording.run_lengths):
        token_ids = recording.token_ids[start : start + length]
        start += length
        if run % 2 and length:
            reply = renderer.decode(token_ids)
            replies.append(environment_pb2.StepCommand(reply=reply, token_ids=token_ids))
    return replies


def _finished(ended: EndedPlay) -> environment_pb2.FinishedEpisode:
    recording = ended.play.recording
    return environment_pb2.FinishedEpisode(
        member=ended.play.member,
        replies=recording.replies,
        reward=recording.reward,
        metrics=recording.metrics,
        truncated=ended.trajectory.status is Status.TRUNCATED,
    )
