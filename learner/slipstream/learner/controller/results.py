"""Writes the results of each step, of each evaluation and of the whole run."""

import asyncio
import logging
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from slipstream.core.errors import RunFailed
from slipstream.core.run_folder import EXPORTS, LEASE_WAITS, SERVER_SHARES
from slipstream.core.types import Trajectory
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.file_digests import file_digests
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.trajectories.formed_batch import Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2

_COUNTED = ("busy_s", "paused_s", "uptime_s")


class StepTimes:
    """Computes the times of each step from counters, which grow from the controller's start.

    Call `report` for each report of a server, and `step` at the end of each step.
    """

    def __init__(self) -> None:
        # Seconds of all servers since the last step, by the names in `_COUNTED`.
        self._work: Counter[str] = Counter()
        self._before: dict[str, float] = {}

    def report(self, before: fleet_pb2.ServerReport, report: fleet_pb2.ServerReport) -> None:
        """Adds the work of a server since its report `before`, an empty one at first."""
        for name in _COUNTED:
            self._work[name] += getattr(report, name) - getattr(before, name)

    def step(
        self,
        groups: Sequence[Group],
        given_s: float,
        *,
        waited_s: float,
        lease_waits_s: Mapping[str, float],
    ) -> dict[str, float]:
        """Returns the times of the step that has just ended, by name.

        `given_s` is when the trainer got the groups, by the monotonic clock; `waited_s` is how long
        it waited for groups, and `lease_waits_s` how long a lease waited, by cause: both in
        seconds, in total since the controller started. With them are the means of the groups' time
        in the queue and of their episodes' rest: the time from lease to arrival outside engine and
        environment, or 0 if an earlier controller leased it.
        """
        totals = {"groups_wait_s": waited_s} | {
            f"lease_wait_{name}_s": lease_waits_s[name] for name in LEASE_WAITS
        }
        passed = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        work = self._work
        self._work = Counter()
        if (uptime_s := work["uptime_s"]) > 0:
            # A server may report a wrong time.
            sampling = min(1.0, max(0.0, work["busy_s"] / uptime_s))
            paused = min(1.0 - sampling, max(0.0, work["paused_s"] / uptime_s))
            shares = (sampling, paused, 1.0 - sampling - paused)
            passed |= zip(SERVER_SHARES, shares, strict=True)
        if waits := [max(0.0, given_s - max(g.back_s.values())) for g in groups if g.back_s]:
            passed["queue_s_mean"] = statistics.fmean(waits)
        rests = [
            max(0.0, back_s - group.leased_s - trajectory.generation_s - trajectory.environment_s)
            if group.leased_s and (back_s := group.back_s.get(trajectory.member)) is not None
            else 0.0
            for group in groups
            for trajectory in group.in_order()
        ]
        if rests:
            passed["episode_rest_s_mean"] = statistics.fmean(rests)
        return passed


# Time between two looks at the ledger, which counts all trajectories that wait.
LEDGER_S = 2.0


class RunResults(Part):
    """Gathers the numbers of a run from its parts, for its journal and its result files."""

    def __init__(
        self,
        run: ControlledRun,
        books: Books,
        recorder: RunRecorder,
        intake: Intake,
        former: BatchFormer,
        publisher: Publisher,
        scheduler: Scheduler,
    ) -> None:
        self._run = run
        self._books = books
        self._recorder = recorder
        self._intake = intake
        self._former = former
        self._publisher = publisher
        self._scheduler = scheduler
        self._times = StepTimes()
        # The newest version with a folder of `checkpoint.export_every`.
        self._exported = 0
        # Done when the last evaluation is on disk; never done after a failure of the disk.
        self._evaluated: asyncio.Future[None] | None = None

    def restore(self, history: RunHistory) -> None:
        self._recorder.rate.earlier = history.servers.generated

    def tasks(self) -> Tasks:
        return {"ledger": self._watch_ledger()}

    def reported(self, session: ServerSession, report: fleet_pb2.ServerReport) -> None:
        self._books.ledger.report(session.key, report)
        if report.busy_s:
            self._recorder.rate.began(time.monotonic() - report.busy_s)
        self._times.report(session.report, report)

    def lost(self, session: ServerSession) -> None:
        self._books.ledger.journal_servers(lost=session.key)

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, given_s: float | None
    ) -> None:
        """Writes the row of a step, unless the step was repeated and already has its row."""
        books = self._books
        books.ledger.journal_servers()
        batch = trained.batch
        if trained.again and self._recorder.has_row(batch.version):
            self._recorder.complete(batch, report.advantages)
            self._run.events.add(f"version {trained.version}, trained again")
            return
        snapshot = books.ledger.snapshot()
        row = self._recorder.step(
            batch,
            report.metrics,
            advantages=report.advantages,
            training_s=report.wall_s,
            generated_tokens=snapshot.generated,
            gauges={
                "leased_groups": float(len(books.leases.training_groups())),
                "queued_tokens": float(snapshot.queued),
                "ledger_difference": float(snapshot.difference),
                "missing_members": float(
                    max(self._num_leased(batch.groups) - len(batch.trajectories), 0)
                ),
                "filtered_groups": float(books.state.filtered_groups[batch.step]),
                "set_aside_batches": float(len(books.state.set_aside)),
                "quarantined_trajectories": float(self._intake.inspector.num_quarantined),
                # A task counts each time it is skipped.
                "skipped_tasks": float(
                    sum(entry.tasks_skipped for entry in books.environments.entries.values())
                ),
                **self._publisher.totals.gauges(),
                **books.fleet.gauges(),
                "reserved_bytes": float(self._scheduler.reserved_bytes),
                **self._times.step(
                    batch.groups,
                    time.monotonic() if given_s is None else given_s,
                    waited_s=self._former.waits.total_s(time.monotonic()),
                    lease_waits_s=self._scheduler.waited_s(),
                ),
            },
        )
        overflows = int(row.get("gradient_overflows", 0))
        scale = row.get("loss_scale")
        if overflows:
            self._run.events.add(
                f"step {batch.version}: gradients left the range of float16 {overflows} times and "
                f"were computed again; the scale of the loss is {scale:g} now"
            )
        self._run.events.add(
            f"version {report.version.step}", step=report.version.step, metrics=row
        )
        exported = int(row.get("exported_version", 0))
        if exported > self._exported:
            self._exported = exported
            folder = self._run.config.run_dir / EXPORTS
            self._run.events.add(f"version {exported} is exported to {folder}/step-{exported:06d}")

    def _num_leased(self, groups: Sequence[Group]) -> int:
        """Returns how many episodes `groups` had at first; a batch that was read has fewer."""
        sizes = self._books.leases.group_sizes
        return sum(sizes.of(group.environment) for group in groups)

    async def _watch_ledger(self) -> None:
        """Adds an error event for each hand-over whose two counts begin to differ."""
        while True:
            await asyncio.sleep(LEDGER_S)
            self._tell_gaps()

    def _tell_gaps(self) -> None:
        for line in self._books.ledger.news():
            self._run.events.add(f"the ledger is open, {line}", logging.ERROR)

    def evaluated(
        self, result: kinds.Evaluation, replies: Sequence[tuple[str, Trajectory]] = ()
    ) -> None:
        """Writes the result of an evaluation round, and `replies` with their evaluations."""
        lines = self._recorder.heldout_lines(result.version, replies)
        checksums = [zlib.crc32(line) for line in lines]
        result = msgspec.structs.replace(result, replies_crc32=checksums)
        journal = self._books.journal
        journal.append(result)
        # While the trainer writes its last model, no other record would take this one to the disk.
        self._evaluated = journal.durable()
        self._recorder.evaluation(result, lines)

    def is_done(self) -> bool:
        return self._evaluated is None or self._evaluated.done()

    async def write(self, goodbye: trainer_pb2.TrainerGoodbye | None) -> None:
        """Marks the run as ended, writes its summary, and closes its event log.

        `goodbye` is the trainer's message, or None if it did not come.
        """
        progress = self._run.progress
        books = self._books
        self._tell_gaps()
        try:
            # The summary names the last line, by which a reader finds out whether one is missing.
            await asyncio.to_thread(books.journal.sync)
        except RunFailed as failure:
            self._run.events.warn(str(failure))
        run_dir = self._run.config.run_dir
        problems: list[str] = []
        files = await asyncio.to_thread(file_digests, run_dir, problems.append)
        for problem in problems:
            self._run.events.warn(problem)
        progress.end()
        state = status_pb2.RunState.Name(progress.state)
        self._recorder.summary(
            ledger=books.ledger.snapshot(),
            state=books.state,
            publish=self._publisher.totals.summary(),
            weight_digest=goodbye.weight_digest.hex() if goodbye is not None else "",
            journal_lines=books.journal.num_durable,
            files=files,
            ending={
                "state": state.removeprefix("RUN_STATE_").lower(),
                "cause": progress.cause,
                "suspended_environments": {**books.environments.suspended()},
                "environments": self._intake.feed.summary(),
            },
        )
        await asyncio.to_thread(self._recorder.close)
        self._run.events.close(progress.state, progress.cause)
