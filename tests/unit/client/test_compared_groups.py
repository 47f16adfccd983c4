"""An environment that compares the episodes of a group: in its audit, and in a check of a run."""

from collections import Counter
from collections.abc import Sequence

import pytest
from slipstream.client.audit import Audit
from slipstream.client.audit_plays import EpisodeLimits, Played, PlayedReply
from slipstream.client.audit_report import findings
from slipstream.client.conversion import group_verdict
from slipstream.client.environment import (
    Environment,
    FinishedEpisode,
    GroupReward,
    StepResult,
)
from slipstream.client.episode_host import EpisodeHost
from slipstream.client.findings import Findings
from slipstream.client.verified_batch import TrajectoryCheck
from slipstream.core.errors import EnvironmentFailed
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import environment_pb2 as pb
from support.fakes.plain_trajectory import plain_trajectory


class Ranked(Environment[str]):
    """A step earns nothing; in a group a right reply earns 1."""

    def tasks(self) -> list[str]:
        return ["north", "south", "west"]

    def reset(self, task: str) -> list[dict[str, str]]:
        self.expected_answer = task
        message = {
            "role": "user",
            "content": f"Say {task}.",
        }
        return [message]

    def step(self, reply: str) -> StepResult:
        return StepResult()

    def judge_group(self, episodes: Sequence[FinishedEpisode]) -> list[float]:
        rewards = []
        for episode in episodes:
            is_right = episode.reply.content == self.expected_answer
            rewards.append(float(is_right))
        return rewards


class NoJudge(Ranked):
    def judge_group(self, episodes: Sequence[FinishedEpisode]) -> list[float]:
        raise RuntimeError("no judge today")


async def audited(environment: Environment[str]) -> Played:
    host = EpisodeHost(environment)

    async def ask(**command: object) -> pb.WorkerMessage:
        order = pb.WorkerCommand(**command)
        return await host.answer(order)

    loaded = pb.Loaded(
        num_tasks=host.num_tasks,
        digest=host.digest(),
    )
    audit = Audit(
        host,
        ask,
        loaded=loaded,
        limit_s=600.0,
        limits=EpisodeLimits(),
    )
    try:
        return await audit.run()
    finally:
        await host.close_all()


async def test_an_audit_compares_what_it_plays() -> None:
    played = await audited(Ranked())
    right_rewards = played.rewards(PlayedReply.RIGHT)
    empty_rewards = played.rewards(PlayedReply.EMPTY)
    assert set(right_rewards.values()) == {1.0}
    assert set(empty_rewards.values()) == {0.0}
    refusals = [finding for finding in findings(played) if finding.is_refused]
    assert refusals == []


async def test_an_audit_tells_of_a_judge_that_fails() -> None:
    played = await audited(NoJudge())
    for _, _, play in played.every():
        assert play.failure.startswith("RuntimeError: no judge today")
    refusals = [finding for finding in findings(played) if finding.is_refused]
    assert refusals


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("ab", "judge_group() must return a reward for each of 2 episodes, got 'ab'"),
        ([0.0, True, 1.0], "a reward for each of 2 episodes"),
        ([0.0, "high"], "the reward of episode 1 must be a finite number, got 'high'"),
        ([0.0, 1e9], "reward"),
        (
            [GroupReward(0.0, {"a": float("inf")}), 0.0],
            "the metric 'a' must be a finite number",
        ),
    ],
)
def test_a_wrong_verdict_on_a_group_is_told_by_its_value(
    result: object, message: str
) -> None:
    with pytest.raises(EnvironmentFailed) as fault:
        group_verdict(result, 2)
    assert message in str(fault.value)


def test_verdicts_of_a_group_may_be_numbers_or_have_metrics() -> None:
    reward = GroupReward(0.5, {"won": 3})
    message = group_verdict((1, reward), 2)
    plain_verdict = message.verdicts[0]
    verdict = message.verdicts[1]
    assert plain_verdict.reward == 1.0
    assert verdict.reward == 0.5
    assert dict(verdict.metrics) == {"won": 3.0}


@pytest.mark.parametrize(
    ("leases", "num_faults"),
    [
        # Epoch and lease of each member: not compared, compared in one lease, and in two.
        ([(1, 0), (2, 0)], 0),
        ([(1, 1), (1, 1)], 0),
        ([(1, 1), (1, 2)], 1),
        ([(1, 1), (2, 1)], 1),
        ([(1, 1), (1, 0)], 1),
    ],
)
def test_verify_finds_a_group_whose_members_were_not_compared_together(
    leases: list[tuple[int, int]],
    num_faults: int,
) -> None:
    results = Findings()
    check = TrajectoryCheck(
        0,
        results,
        run_id="run",
        tasks={"group": ("environment", 0, 0)},
        ended={},
        versions={},
        max_staleness=1,
    )
    for member, lease in enumerate(leases):
        trajectory = plain_trajectory(
            [1, 2],
            (1, 1),
            member=member,
            server_epoch=lease[0],
            judged_lease=lease[1],
        )
        message = trajectory_to_pb(trajectory)
        check.take(f"member {member}", message, Counter())
    assert results.num_faults == num_faults, results.faults
