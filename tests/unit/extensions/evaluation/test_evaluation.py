"""Rounds of evaluation: the server that is pinned, and the statistics."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.core.types import MEASURED, PolicyVersion
from slipstream.extensions.evaluation.controller import (
    EvaluatedEpisode,
    Evaluator,
    evaluation_statistics,
    pass_at_k,
)
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.services.environment_service import environment_specs
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch, Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import READY, joined, nothing, run_of, sent
from support.rigs.waiting import LIMIT_S


class Rig:
    """An evaluator of one held-out environment, and the servers that a test adds."""

    def __init__(
        self, folder: Path, journal: Journal, tasks: asyncio.TaskGroup
    ) -> None:
        algorithm = {"group_size": 2, "groups_per_step": 1, "max_staleness": 1}
        self.journal = journal
        self.tasks = tasks
        self.run = run_of(
            run={"name": "r", "steps": 10, "dir": str(folder)},
            algorithm={**algorithm, "learning_rate": 1e-3},
            evaluations=[
                {
                    "name": "held",
                    "reference": "m:E",
                    "num_episodes": 2,
                    "every_steps": 1,
                }
            ],
        )
        books = books_of(self.run, journal=journal)
        self.book = books.leases
        self.environments = books.environments
        self.fleet = books.fleet
        for spec in environment_specs(self.run.config, search_path=""):
            self.environments.add(spec)
        intake = Intake(self.run, books)
        self.publisher = Publisher(self.fleet, self.run, tasks)
        scheduler = Scheduler(self.run, books, nothing)
        results: Any = SimpleNamespace(evaluated=nothing)
        self.evaluator = Evaluator(
            self.run, books, intake, self.publisher, scheduler, results
        )

    def joined(self, name: str) -> ServerSession:
        return joined(self.fleet, name, max_episodes=8)

    def serve(self, session: ServerSession, step: int) -> None:
        session.state = fleet_pb2.SERVER_STATE_SERVING
        session.version = PolicyVersion(0, step)

    def load(self, session: ServerSession) -> None:
        self.environments.entries["held"].loaded(session.key, 5)

    async def leases(self, session: ServerSession) -> int:
        """Number of leases that a server got since the last call, once all records are durable."""
        await self.journal.durable()
        return sent(session).count("lease")

    def turn(self) -> None:
        self.evaluator._turn()

    async def asked(self) -> asyncio.Task[weights_pb2.PublishOrder | None]:
        """A publish whose servers have been asked if they are ready."""
        preparing = self.tasks.create_task(
            self.publisher.prepare(trainer_pb2.NextRequest())
        )
        await asyncio.sleep(0)
        return preparing

    def ready(self, session: ServerSession) -> None:
        while (message := session.outbox.pop()) is not None:
            if message.HasField("prepare"):
                publish_id = message.prepare.publish_id
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=READY)
        self.publisher.publish_reported(session, report)


@contextlib.asynccontextmanager
async def measuring(folder: Path) -> AsyncIterator[Rig]:
    with Journal(folder / "journal") as journal:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            yield Rig(folder, journal, tasks)


async def test_one_server_at_a_time_waits_for_the_environments_of_a_round(
    tmp_path: Path,
) -> None:
    async with measuring(tmp_path) as rig:
        first = rig.joined("first")
        second = rig.joined("second")
        rig.serve(second, 0)
        rig.turn()
        assert rig.publisher.pinned == {second.key}
        # Server `first` serves a moment later, and stands before `second` in the fleet.
        rig.serve(first, 0)
        rig.turn()
        assert rig.publisher.pinned == {second.key}
        rig.run.progress.reached(PolicyVersion(0, 1))
        assert rig.publisher.due() == [first]
        rig.load(first)
        rig.load(second)
        rig.turn()
        assert (await rig.leases(first), await rig.leases(second)) == (0, 2)


async def test_a_server_that_waits_for_environments_is_measured_though_a_later_round_is_due(
    tmp_path: Path,
) -> None:
    async with measuring(tmp_path) as rig:
        session = rig.joined("only")
        rig.serve(session, 0)
        rig.turn()
        rig.run.progress.reached(PolicyVersion(0, 1))
        trained = Trained(
            FormedBatch(0, "b000000", ()), PolicyVersion(0, 1), again=False
        )
        rig.evaluator.stepped(trained, trainer_pb2.StepReport(), None)
        # The round keeps the server from new versions, so the round must not wait for one.
        assert rig.publisher.due() == []
        rig.load(session)
        rig.turn()
        assert await rig.leases(session) == 2
        assert not rig.evaluator.is_done()


async def test_a_server_that_never_has_the_environments_does_not_keep_others_from_a_round(
    tmp_path,
):
    async with measuring(tmp_path) as rig:
        first = rig.joined("first")
        second = rig.joined("second")
        rig.serve(first, 0)
        rig.turn()
        assert rig.publisher.pinned == {first.key}
        rig.serve(second, 0)
        rig.load(second)
        rig.turn()
        assert rig.publisher.pinned == {second.key}
        assert (await rig.leases(first), await rig.leases(second)) == (0, 2)


async def test_a_server_with_an_order_for_another_version_is_not_measured(
    tmp_path: Path,
) -> None:
    async with measuring(tmp_path) as rig:
        session = rig.joined("only")
        rig.load(session)
        rig.serve(session, 0)
        rig.run.progress.reached(PolicyVersion(0, 1))
        preparing = await rig.asked()
        rig.ready(session)
        assert await preparing is not None
        # The trainer has not begun to send: it still serves.
        rig.turn()
        assert rig.publisher.pinned == set()
        assert await rig.leases(session) == 0


async def test_a_server_that_is_measured_since_it_was_asked_keeps_its_version(tmp_path):
    async with measuring(tmp_path) as rig:
        session = rig.joined("only")
        rig.serve(session, 0)
        rig.run.progress.reached(PolicyVersion(0, 1))
        preparing = await rig.asked()
        rig.turn()
        assert rig.publisher.pinned == {session.key}
        rig.ready(session)
        assert await preparing is None
        assert session.is_serving


async def test_leases_of_a_round_leave_once_their_records_are_durable(
    tmp_path: Path,
) -> None:
    async with measuring(tmp_path) as rig:
        session = rig.joined("only")
        rig.load(session)
        rig.serve(session, 0)
        rig.turn()
        assert sent(session).count("lease") == 0
        assert await rig.leases(session) == 2


async def test_a_round_begins_again_when_its_server_serves_no_more(
    tmp_path: Path,
) -> None:
    async with measuring(tmp_path) as rig:
        session = rig.joined("only")
        rig.load(session)
        rig.serve(session, 0)
        rig.turn()
        assert await rig.leases(session) == 2
        session.state = fleet_pb2.SERVER_STATE_STALE
        rig.turn()
        assert rig.publisher.due() == [session]
        rig.serve(session, 1)
        rig.turn()
        assert await rig.leases(session) == 2


def episode(
    task: int, reward: float, *reply_tokens: int, truncated: bool = False, **metrics
):
    return EvaluatedEpisode(
        task, reward, reply_tokens or (1,), truncated, tuple(metrics.items())
    )


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_in_which_one_passes(num_samples: int):
    for num_passed in range(num_samples + 1):
        passed = [index < num_passed for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(passed, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(
                share, abs=1e-12
            )


def test_rewards_lengths_and_cut_off_replies_are_told():
    episodes = [
        episode(0, 0.0, 2, 4),
        episode(1, 1.0, 6, truncated=True),
        episode(2, 4.0, 8),
    ]
    statistics = evaluation_statistics(
        episodes, num_failed=2, samples=1, pass_reward=1.0
    )
    assert statistics == {
        "reward_mean": pytest.approx(5 / 3),
        # Squares of the differences: 25/9, 4/9, 49/9; their mean is 78/27.
        "reward_std": pytest.approx((78 / 27) ** 0.5),
        "reward_min": 0.0,
        "reward_max": 4.0,
        "reward_median": 1.0,
        "reply_tokens_mean": 5.0,
        "reply_tokens_max": 8.0,
        "truncated_fraction": pytest.approx(1 / 3),
        "pass_at_1": pytest.approx(2 / 3),
        "num_episodes": 3.0,
        "num_failed": 2.0,
    }


def test_pass_at_k_is_a_mean_over_tasks_that_have_enough_replies():
    episodes = [
        episode(0, 1),
        episode(0, 0),
        episode(0, 0),
        episode(1, 1),
        episode(1, 1),
    ]
    statistics = evaluation_statistics(episodes, num_failed=1, samples=4)
    # Task 0: 1 of 3 passes, task 1: 2 of 2.
    assert statistics["pass_at_1"] == pytest.approx((1 / 3 + 1) / 2)
    assert statistics["pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert "pass_at_4" not in statistics
    assert "pass_at_3" not in statistics
    statistics = evaluation_statistics(episodes, num_failed=0, samples=3)
    assert [statistics[f"pass_at_{k}"] for k in (2, 3)] == [
        pytest.approx((2 / 3 + 1) / 2),
        1.0,
    ]


def test_a_reply_passes_from_a_reward_of_1_on():
    episodes = [
        episode(0, 1.0),
        episode(1, 0.99),
        episode(2, 0.7 + 0.2 + 0.1),
        episode(3, 0),
    ]
    statistics = evaluation_statistics(episodes, num_failed=0, samples=1)
    assert statistics["pass_at_1"] == 0.5


def test_on_a_scale_beyond_1_a_reply_passes_from_the_reward_that_the_settings_say() -> (
    None
):
    episodes = [episode(0, 3.0), episode(1, 10.0), episode(2, 7.0), episode(3, 0.0)]
    unsaid = evaluation_statistics(episodes, num_failed=0, samples=1)
    assert not any(name.startswith("pass_at_") for name in unsaid)
    assert unsaid["reward_mean"] == 5.0
    rate = evaluation_statistics(episodes, num_failed=0, samples=1, pass_reward=7.0)
    assert rate["pass_at_1"] == 0.5
    # Rounding of a sum is no other scale.
    sums = [episode(0, 1.0 + 1e-12), episode(1, 0.0)]
    assert evaluation_statistics(sums, num_failed=0, samples=1)["pass_at_1"] == 0.5


def test_metrics_of_the_environment_are_averaged_over_the_episodes_that_have_them():
    episodes = [episode(0, 1, right=1.0), episode(1, 0, right=0.0), episode(2, 0)]
    statistics = evaluation_statistics(episodes, num_failed=0, samples=1)
    assert statistics["right"] == 0.5


def test_a_round_in_which_every_episode_failed_has_only_counts():
    statistics = evaluation_statistics([], num_failed=3, samples=1)
    assert statistics == {"num_episodes": 0.0, "num_failed": 3.0}


def test_no_metric_of_an_environment_has_a_name_of_the_statistics() -> None:
    episode = EvaluatedEpisode(0, 1.0, reply_tokens=(3,), truncated=False)
    names = evaluation_statistics([episode] * 8, num_failed=0, samples=8)
    assert [name for name in names if MEASURED.fullmatch(name) is None] == []
