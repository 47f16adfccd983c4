"""Held-out environments, measured at one version while training goes on.

Consumes: evaluation groups that came back. Produces: evaluation leases and their results.
Waits for: a server that serves the wanted version. Unblocked by: the run's signal. That server
keeps its version until the round is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.learner.controller.environments import EnvironmentBook
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.fleet import Fleet, ServerSession
from slipstream.learner.controller.intake import Intake
from slipstream.learner.controller.leases import Group, LeaseBook
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.publish import Publisher
from slipstream.learner.controller.scheduler import Scheduler
from slipstream.protocol.types import GroupId, PolicyVersion
from slipstream.v1 import fleet_pb2


@dataclass(eq=False)
class Round:
    """One evaluation of all held-out environments at one version."""

    version: PolicyVersion
    session: ServerSession
    # Episodes that are still to be leased: environment and task index.
    waiting: list[tuple[str, int]]
    running: dict[GroupId, Group] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    failed: int = 0
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class EvaluationResult:
    """Mean rewards of one round."""

    step: int
    reward_mean: float
    by_environment: dict[str, float]
    num_episodes: int
    num_failed: int
    wall_s: float


class Evaluator:
    """Runs the rounds: before the first step, after every n-th, after the last."""

    def __init__(
        self,
        progress: RunProgress,
        book: LeaseBook,
        environments: EnvironmentBook,
        fleet: Fleet,
        intake: Intake,
        publisher: Publisher,
        scheduler: Scheduler,
        *,
        on_result: Callable[[EvaluationResult], None],
    ) -> None:
        self._progress = progress
        self._sections = progress.config.evaluations
        self._book = book
        self._environments = environments
        self._fleet = fleet
        self._intake = intake
        self._publisher = publisher
        self._scheduler = scheduler
        self._on_result = on_result
        self._round: Round | None = None
        self._wanted_step: int | None = 0 if self._sections else None
        self.results: list[EvaluationResult] = []

    async def run_forever(self) -> None:
        """Starts rounds and feeds them until it is cancelled."""
        while True:
            if self._progress.trainer_registered and not self._progress.is_over:
                self._turn()
            await self._progress.signal.wait(0.5)

    def step_done(self, step: int) -> None:
        """A version exists: it may be one that is to be evaluated."""
        last = step >= self._progress.config.run.steps
        due = any(e.every_steps and step % e.every_steps == 0 for e in self._sections)
        if self._sections and (last or due):
            self._wanted_step = step

    def is_done(self) -> bool:
        """Whether nothing is left to evaluate."""
        return self._round is None and self._wanted_step is None

    def server_lost(self, session: ServerSession) -> None:
        """The round of a lost server starts again elsewhere."""
        round_, self._round = self._round, None
        if round_ is None:
            return
        if round_.session is not session:
            self._round = round_
            return
        self._wanted_step = max(round_.version.step, self._wanted_step or 0)
        self._scheduler.reserved.pop(session.key, None)
        self._intake.withdraw(list(round_.running.values()), "its server is gone")

    def _turn(self) -> None:
        if self._round is None:
            self._start()
        if self._round is not None:
            self._collect(self._round)
            self._lease(self._round)
            if not self._round.waiting and not self._round.running:
                self._finish(self._round)

    def _start(self) -> None:
        if self._wanted_step is None:
            return
        for session in self._fleet.serving():
            version = session.version
            assert version is not None
            if not self._suits(version):
                continue
            held_out = self._environments.evaluations()
            broken = [entry for entry in held_out if session.key in entry.failed_on]
            if broken:
                self._give_up(session, f"{broken[0].spec.name}: {broken[0].cause}")
                return
            # It keeps its version from here on, also while the environments are still loading.
            self._publisher.pinned.add(session.key)
            if all(entry.runs_on(session.key) for entry in held_out):
                self._round = Round(version, session, self._tasks())
                self._wanted_step = None
                self._scheduler.reserved[session.key] = len(self._round.waiting)
            return

    def _suits(self, version: PolicyVersion) -> bool:
        """The last version is measured itself; an earlier round takes what is served by now."""
        wanted, last = self._wanted_step, self._progress.config.run.steps
        assert wanted is not None
        return version.step >= wanted and (wanted < last or version.step == last)

    def _give_up(self, session: ServerSession, cause: str) -> None:
        self._wanted_step = None
        self._publisher.pinned.discard(session.key)
        self._progress.events.add(f"no evaluation: {cause}", Severity.ERROR)
        self._progress.signal.notify()

    def _tasks(self) -> list[tuple[str, int]]:
        tasks = []
        for section in self._sections:
            entry = self._environments.entries[section.name]
            count = entry.num_tasks or section.num_episodes
            tasks += [(section.name, number % count) for number in range(section.num_episodes)]
        return tasks

    def _lease(self, round_: Round) -> None:
        while round_.waiting and self._scheduler.room(round_.session) > 0:
            name, task_index = round_.waiting.pop()
            key, step = round_.session.key, round_.version.step
            group = self._book.lease_evaluation(name, task_index, task_index, key, step)
            round_.running[group.group_id] = group
            message = self._scheduler.lease_message(group)
            round_.session.send(fleet_pb2.ControllerMessage(lease=message))
        self._scheduler.reserved[round_.session.key] = len(round_.waiting)

    def _collect(self, round_: Round) -> None:
        for group_id, group in list(round_.running.items()):
            if group.is_complete:
                rewards = round_.rewards.setdefault(group.environment, [])
                rewards.append(group.finished[0].reward)
                self._intake.end_evaluated(group)
                del round_.running[group_id]
            elif group_id not in self._book.groups:
                round_.failed += 1
                del round_.running[group_id]

    def _finish(self, round_: Round) -> None:
        self._round = None
        self._publisher.pinned.discard(round_.session.key)
        self._scheduler.reserved.pop(round_.session.key, None)
        means = {name: statistics.fmean(rewards) for name, rewards in round_.rewards.items()}
        everything = [reward for rewards in round_.rewards.values() for reward in rewards]
        result = EvaluationResult(
            step=round_.version.step,
            reward_mean=statistics.fmean(everything) if everything else float("nan"),
            by_environment=means,
            num_episodes=len(everything),
            num_failed=round_.failed,
            wall_s=time.monotonic() - round_.started_s,
        )
        self.results.append(result)
        self._on_result(result)
        failed = f", {result.num_failed} failed" if result.num_failed else ""
        self._progress.events.add(
            f"held-out reward at version {result.step}: {result.reward_mean:.3f} "
            f"over {result.num_episodes} episodes{failed}"
        )
        self._progress.signal.notify()
