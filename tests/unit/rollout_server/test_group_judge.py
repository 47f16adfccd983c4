"""Episodes of a group that their environment compares with each other, at a server."""

import asyncio
from collections.abc import Sequence

import pytest
from slipstream.client.environment import (
    Environment,
    FinishedEpisode,
    GroupReward,
    Message,
    ResetResult,
    StepResult,
)
from slipstream.core.types import FailureKind, Status
from slipstream.v1 import fleet_pb2
from support.rigs.waiting import LIMIT_S

Episodes = Sequence[FinishedEpisode]


class Numbered(Environment[str]):
    """A demonstration whose step earns a quarter, and whose group is numbered from 0."""

    def __init__(self) -> None:
        self.groups: list[Episodes] = []
        self.seeds: list[int] = []

    def tasks(self) -> list[str]:
        return ["a b"]

    def reset(self, task: str) -> ResetResult:
        self.task = task
        message = Message("user", "a")
        return ResetResult([message], reply=task)

    def step(self, reply: str) -> StepResult:
        words = reply.split()
        return StepResult(
            0.25,
            metrics={"words": float(len(words))},
        )

    def judge_group(self, episodes: Episodes) -> list[GroupReward]:
        assert self.task == "a b"
        self.groups.append(episodes)
        self.seeds.append(self.seed)
        rewards = []
        for place in range(len(episodes)):
            reward = GroupReward(
                float(place),
                metrics={"place": place},
            )
            rewards.append(reward)
        return rewards


async def test_a_group_is_compared_once_all_of_its_members_have_ended(server) -> None:
    environment = Numbered()
    server.fleet.serve(environment)
    trajectories = await server.played(
        3,
        members=[0, 1, 2],
        seed=7,
    )
    for place, trajectory in enumerate(trajectories):
        assert trajectory.member == place
        assert trajectory.reward == 0.25 + place
        assert trajectory.metrics["place"] == place
        assert trajectory.judged_lease == 1
        assert trajectory.status is Status.COMPLETED
    (episodes,) = environment.groups
    assert environment.seeds == [7]
    for place, episode in enumerate(episodes):
        assert episode.member == place
        assert str(episode.reply) == "a b"
        assert episode.task == "a b"
        assert episode.reward == 0.25
        assert episode.metrics["words"] == 2.0


async def test_nothing_is_delivered_before_the_verdict(server) -> None:
    num_delivered: list[int] = []

    class Looking(Numbered):
        def judge_group(self, episodes: Episodes) -> list[GroupReward]:
            num_delivered.append(len(server.fleet.trajectories))
            return super().judge_group(episodes)

    server.fleet.serve(Looking())
    await server.played(3, members=[0, 1, 2])
    assert num_delivered == [0]


class Failing(Numbered):
    """Fails at the first `failures` calls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        # A list: each episode has a shallow copy of the environment.
        self.calls: list[str] = []
        self.failures = failures

    def judge_group(self, episodes: Episodes) -> list[GroupReward]:
        self.calls.append("judge_group")
        if len(self.calls) <= self.failures:
            raise RuntimeError("no judge today")
        return super().judge_group(episodes)


async def test_a_judge_that_fails_is_asked_again_about_the_same_replies(server) -> None:
    environment = Failing(failures=1)
    server.fleet.serve(environment)
    trajectories = await server.played(
        2,
        members=[0, 1],
        max_attempts=2,
    )
    rewards = [trajectory.reward for trajectory in trajectories]
    attempts = [trajectory.attempt for trajectory in trajectories]
    assert rewards == [0.25, 1.25]
    assert attempts == [0, 0]
    assert len(environment.calls) == 2


async def test_a_judge_without_an_answer_fails_every_member(server) -> None:
    environment = Failing(failures=9)
    server.fleet.serve(environment)
    trajectories = await server.played(
        2,
        members=[0, 1],
        max_attempts=2,
    )
    assert len(environment.calls) == 2
    for trajectory in trajectories:
        failure = trajectory.failure
        assert trajectory.status is Status.FAILED
        assert failure.kind is FailureKind.ENVIRONMENT
        assert failure.message.startswith("judge_group: RuntimeError: no judge today")
        assert not trajectory.will_retry


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            [1.0],
            "judge_group() must return a reward for each of 2 episodes, got [1.0]",
        ),
        (
            None,
            "judge_group() must return a reward for each of 2 episodes, got None",
        ),
        (
            [1.0, float("nan")],
            "the reward of episode 1 must be a finite number, got nan",
        ),
        (
            [1.0, 1e6],
            "the rewards of an episode add up to 1e+06",
        ),
    ],
)
async def test_a_verdict_that_cannot_be_is_a_failure(server, result, message) -> None:
    class Odd(Numbered):
        def judge_group(self, episodes: Episodes) -> object:
            return result

    server.fleet.serve(Odd())
    trajectories = await server.played(
        2,
        members=[0, 1],
        max_attempts=1,
    )
    for trajectory in trajectories:
        assert trajectory.status is Status.FAILED
        assert message in trajectory.failure.message


class Silent(Numbered):
    """Never gives a verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()

    async def judge_group(self, episodes: Episodes) -> list[GroupReward]:
        self.is_asked.set()
        await asyncio.Event().wait()
        return []


async def test_a_judge_that_does_not_answer_is_bounded(server) -> None:
    server.fleet.serve(Silent())
    trajectories = await server.played(
        2,
        members=[0, 1],
        max_attempts=1,
        timeout_s=3.0,
    )
    for trajectory in trajectories:
        failure = trajectory.failure
        assert failure.kind is FailureKind.TIMEOUT
        assert "no answer to judge_group within 3 s" in failure.message


async def test_members_that_failed_are_left_out_and_come_behind(server) -> None:
    class FirstFails(Numbered):
        number = 0

        def step(self, reply: str) -> StepResult:
            FirstFails.number += 1
            if FirstFails.number == 1:
                raise RuntimeError("the first one fails")
            return super().step(reply)

    environment = FirstFails()
    server.fleet.serve(environment)
    trajectories = await server.played(
        3,
        members=[0, 1, 2],
        max_attempts=1,
    )
    have_reward = [trajectory.has_reward for trajectory in trajectories]
    assert have_reward == [True, True, False]
    (episodes,) = environment.groups
    assert len(episodes) == 2


async def test_a_cancel_while_the_judge_thinks_gives_the_whole_group_back(
    server,
) -> None:
    environment = Silent()
    server.fleet.serve(environment)
    connection = await server.leased(members=[0, 1])
    await asyncio.wait_for(environment.is_asked.wait(), LIMIT_S)
    cancel = fleet_pb2.CancelLease(
        group_id="g1",
        reason="test",
    )
    connection.send(cancel=cancel)
    trajectories = await server.fleet.wait_trajectories(2)
    for trajectory in trajectories:
        assert trajectory.status is Status.CANCELLED
    report = await connection.wait_for("lease")
    assert report.unfinished == [0, 1]
