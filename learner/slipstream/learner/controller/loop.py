"""The loop of a run: what the trainer does next, the batch of a step, and the other tasks.

Each task changes the run's state, calls `Signal.notify`, and waits for the signal again:

    task         takes                             makes               waits for            ended by
    -----------  --------------------------------  ------------------  -------------------  --------
    Next         complete groups, due servers      batches, orders     a batch, a server    signal
    scheduler    free places, books of tasks       leases              room, a fresh group  signal
    intake       trajectories of the queue         complete groups     the queue            delivery
    flush        ended episodes                    acknowledgements    the journal's disk   fsync
    receivers    reports on a publish              serving servers     each phase           deadline
    storage      versions in storage               publishes to read   a newer version      signal
    evaluator    servers that serve a due version  leases, results     its episodes         signal
    watch        silence, stalls, late leases      lost servers, end   time                 clock
    checkpoints  files that the trainer completes  events              time                 clock
    ledger       counts of tokens on both sides    error events        time                 clock

No wait is endless: a signal's wait has a time limit, a server or trainer that says nothing is lost,
and a run without progress fails after `controller.stall_timeout_s`. `Next` itself answers within
its limit, and the trainer calls again. At the end of the run `application.py` cancels the tasks.

The journal holds a whole batch before the trainer gets it; only then are the batch's trajectories
acknowledged.

Consumes: complete groups, servers that need weights, the trainer's reports. Produces: orders,
batches, records of steps. Waits for: groups, servers, the journal's disk. Unblocked by: the run's
signal, the limit of a call, the end of a write.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.events import GATHER_S
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.leasing.shares import Mixture
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.kinds import TrajectoryEnd
from slipstream.learner.controller.records.recorded_steps import JournaledStep, batch_name
from slipstream.learner.controller.run import ControlledRun, Stopwatch
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.formed_batch import (
    FormedBatch,
    SetAside,
    StepOrder,
    Trained,
    from_contents,
)
from slipstream.protocol.checkpoints import first_needed_step
from slipstream.protocol.codec import version_from_pb
from slipstream.v1 import status_pb2
from slipstream.v1 import trainer_pb2 as pb


class TrainerOrders:
    """What the trainer does next: the loop that its calls of `Next` turn."""

    def __init__(
        self,
        run: ControlledRun,
        book: LeaseBook,
        former: "BatchFormer",
        publisher: Publisher,
        parts: Sequence[Part],
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._book = book
        self._former = former
        self._publisher = publisher
        self._parts = parts
        # Version of the trainer's weights; after a restart it may be older than the run's version.
        self.trainer_version = run.progress.version
        # Set when the trainer leaves on purpose.
        self.goodbye: pb.TrainerGoodbye | None = None

    async def next(
        self, request: pb.NextRequest, limit_s: float, check_trainer: Callable[[], Awaitable[None]]
    ) -> pb.Directive | bytes | FormedBatch:
        """Returns the first order within `limit_s`, or one to ask again.

        `check_trainer` raises what ends the call of a trainer that another one has replaced.
        """
        until_s = time.monotonic() + limit_s
        # Operations of a client come one by one, and each is worth an answer of its own.
        gather_s = 0.0 if self._run.config.controller.client_loop else GATHER_S
        while True:
            await check_trainer()
            try:
                order = await self._order(request)
            except (ProtocolError, RunFailed) as failure:
                self._progress.fail(str(failure))
                continue
            if order is not None:
                return order
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return pb.Directive(wait=pb.WaitOrder())
            # A server that is to be retried becomes due without a signal.
            await self._run.signal.changes(min(remaining_s, 0.25), gather_s=gather_s)

    async def _order(self, request: pb.NextRequest) -> pb.Directive | bytes | FormedBatch | None:
        """Returns the next order, or None if there is none yet and the run waits for something.

        Raises ProtocolError or RunFailed if the run cannot continue.
        """
        progress = self._progress
        is_behind = self.trainer_version.step < self._book.step
        if is_behind and (not progress.is_over or self.is_stopping):
            # The trainer restarted from a checkpoint, or an answer was lost.
            return await self._former.recorded(self.trainer_version.step)
        if progress.is_over:
            for part in self._parts:
                await part.before_stop()
            reason = progress.cause or "the run is over"
            # The controller of a failed run does not wait for an export, which could be cut off.
            stop = pb.StopOrder(reason=reason, without_model=progress.has_failed)
            return pb.Directive(stop=stop)
        publish = await self._publisher.prepare(request)
        receivers = (
            () if publish is None else [receiver.server_id for receiver in publish.receivers]
        )
        for part in self._parts:
            part.trainer_asks(receivers)
        if publish is not None:
            return pb.Directive(publish=publish)
        for part in self._parts:
            if (order := part.order(request)) is not None:
                return order
        if not progress.all_steps_done:
            next_step = None
            for part in self._parts:
                next_step = next_step or part.next_step()
            batch = await self._former.form(next_step)
            if batch is not None:
                progress.waits_for(f"the trainer to make version {batch.version}")
                progress.moved()
                # The servers can answer while the trainer makes the version.
                version = progress.version
                self._publisher.ask_ahead(PolicyVersion(version.incarnation, batch.version))
                return batch
            waits = filter(None, (part.waits_for() for part in self._parts))
            progress.waits_for(next(waits, "") or batch_wait(self._book, self._former.awaited))
            return None
        if all(part.is_done() for part in self._parts):
            progress.complete()
        else:
            progress.waits_for("the last evaluation")
        return None

    @property
    def is_stopping(self) -> bool:
        """Whether the run is stopping and a trainer, even a restarted one, must save and export."""
        stopping = self._progress.state == status_pb2.RUN_STATE_STOPPING
        return stopping and self._progress.has_trainer and self.goodbye is None


def batch_wait(book: LeaseBook, awaited: Sequence[Group]) -> str:
    """Returns the groups for which the next batch waits, as a text for users.

    `awaited` are those of which environments have too few for their shares.
    """
    if awaited:
        names = ", ".join(sorted({group.environment for group in awaited}))
        return (
            f"{len(awaited)} groups of {names}, which belong to the shares of step {book.step + 1}"
        )
    due = book.due()
    if due:
        members = sum(len(group.missing) for group in due)
        return (
            f"{members} episodes that step {book.step + 1} cannot leave for later, "
            f"the first of group {due[0].group_id}"
        )
    training = book.training_groups()
    if not training:
        return (
            "a rollout server that serves, with an environment that is loaded, of the settings or "
            "of a client (slipstream submit)"
        )
    complete = sum(group.is_complete for group in training)
    return (
        f"groups for step {book.step + 1}: {complete} of "
        f"{book.groups_per_step} are complete, {len(training)} are leased"
    )


class BatchFormer:
    """Takes batches from the lease book, makes them durable, and reads them again from the journal.

    Life of a batch: `form` (or `recorded`, for a step that is trained again) gives it to the
    trainer; `trained` or `set_aside` handles the trainer's report. `answered` recognises repeated
    reports.
    """

    def __init__(self, books: Books, tasks: asyncio.TaskGroup) -> None:
        self._book = books.leases
        self._journal = books.journal
        self._state = books.state
        self._ledger = books.ledger
        self._receiver = books.queue
        self._environments = books.environments
        self._fleet = books.fleet
        self._tasks = tasks
        # The task that writes a batch: it finishes even when the trainer's call breaks off.
        self._forming: asyncio.Task[FormedBatch | RunFailed] | None = None
        # A batch that a client will most likely order, and the task that writes its file.
        self._ahead: tuple[FormedBatch, asyncio.Task[kinds.StepBatch | RunFailed]] | None = None
        # The batch that the trainer has.
        self.training: FormedBatch | None = None
        # Last report of the trainer and the answered version, in case the answer was lost.
        self._reported: tuple[pb.StepReport, PolicyVersion] | None = None
        # Groups of the shares of environments, for which the next batch waits.
        self.awaited: list[Group] = []
        # Runs while the trainer waits for groups.
        self.waits = Stopwatch()

    def restore(self, history: RunHistory) -> None:
        """Restores the trajectories of groups that set-aside batches put back, from their files.

        Those of a group that was closed, whose ends a crash cut off, end now: no queue has them.
        """
        files = {
            (put_back.step, put_back.attempt): put_back for put_back in history.put_back.values()
        }
        for batch in files.values():
            for recorded in from_contents(self._journal.read_batch(batch)).groups:
                if recorded.group_id not in history.put_back:
                    continue
                trajectories = {
                    member: trajectory
                    for member, trajectory in recorded.finished.items()
                    if trajectory.trajectory_id not in history.ended
                    and self._ledger.receive(
                        ServerKey(trajectory.server_id, trajectory.server_epoch),
                        trajectory.trajectory_id,
                        trajectory.num_sampled_tokens,
                    )
                }
                group = self._book.groups.get(recorded.group_id)
                if group is not None:
                    group.refill(recorded.finished, trajectories)
                    continue
                for trajectory in trajectories.values():
                    self._ledger.end(trajectory, TrajectoryEnd.CANCELLED, "its group is over")

    def trainer_joined(self) -> None:
        """Notes a new trainer, which has no batch and has not reported anything."""
        self.training = self._reported = None

    def first_missing(self, step: int) -> Path | None:
        """Returns the first batch file missing from `step` on, unless it is being written now."""
        steps = range(step, self._book.step - (self._forming is not None))
        paths = (self._journal.path(step, self._state.attempts[step]) for step in steps)
        return next((path for path in paths if not path.is_file()), None)

    def identify(self, version: PolicyVersion, digest: str) -> PolicyVersion:
        """Returns the run's version for the trainer's weights; see `version_of`."""
        recorded = self._state.steps.get(version.step - 1)
        newest = self._state.version.incarnation
        trainer = version.incarnation
        return version_of(version.step, digest, recorded, trainer=trainer, newest=newest)

    async def adopt(self, version: PolicyVersion, digest: str) -> None:
        """Journals the weights with which a trainer has registered, if the journal lacks them.

        They may be others than those that it has of their step: another trainer made that one again
        meanwhile, or it began before their checkpoint was whole. The run goes on from them, so that
        the steps from which they were made are journaled anew as well.
        """
        registered = self.identify(version, digest)
        steps = self._state.steps
        last = version.step - 1
        remade = {
            before.version.step - 1: before
            for before in self._state.replaced
            if before.version.step <= last
            and before.version.incarnation
            <= version.incarnation
            < steps[before.version.step - 1].version.incarnation
        }
        if last in steps and steps[last].version != registered:
            remade[last] = JournaledStep(registered, digest)
        if remade:
            await self.durable()
            # The files of their batches may be gone.
            records = await asyncio.to_thread(self._journal.read_steps, {*remade})
            for step, journaled in sorted(remade.items()):
                changes = {"version": journaled.version, "digest": journaled.digest}
                self._journal.append(msgspec.structs.replace(records[step], **changes))

    async def recorded(self, step: int) -> FormedBatch:
        """Returns the journaled batch of `step`, which is now the trainer's batch."""
        if self._forming is not None:
            await self.form()
        if self.training is None or self.training.step != step:
            batch = self._state.batches[step]
            stored = self._journal.read_batch(batch)
            self.training = await asyncio.to_thread(from_contents, stored)
        return self.training

    async def take_up(self, message: pb.StepReport | pb.DataFault, trainer: PolicyVersion) -> None:
        """Makes the batch of `message` the trainer's batch, if the journal has it.

        An earlier controller gave this batch to the trainer of version `trainer`, which has since
        registered with this controller. Does nothing if this controller has given it a batch.
        """
        is_its = message.step == trainer.step
        if not is_its or self.training is not None or self._reported is not None:
            return
        batch = self._state.batches.get(message.step)
        if batch is not None and batch.batch_id == message.batch_id:
            await self.recorded(batch.step)

    async def form(self, order: StepOrder | None = None) -> FormedBatch | None:
        """Returns the trainer's next batch, durable and acknowledged, or None if none is ready.

        With `order` the batch has no groups, and is what a client orders. Raises RunFailed if the
        journal cannot be written.
        """
        if self._forming is None:
            step = self._book.step
            groups: list[Group] = []
            owed: Mapping[str, float] = {}
            if order is None:
                choice = self._book.choose_batch(self._mixture())
                self.awaited = [] if choice is None else choice.awaited
                is_ready = choice is not None and not self.awaited
                self.waits.note(time.monotonic(), running=not is_ready)
                if choice is None or not is_ready:
                    return None
                groups = self._book.take_batch(choice)
                owed = choice.owed
            else:
                self.waits.note(time.monotonic(), running=False)
                self._book.step += 1
            name = batch_name(step, self._state.attempts[step])
            batch = FormedBatch(step, name, tuple(groups), order, owed)
            self._ledger.batch_begins(batch.trajectories)
            self._forming = self._tasks.create_task(self._write(batch))
        written = await asyncio.shield(self._forming)
        self._forming = None
        if isinstance(written, RunFailed):
            raise written
        self.training = written
        return written

    def _mixture(self) -> Mixture:
        """Returns the facts from which the shares of the environments in the next batch follow."""
        environments = self._environments.training()
        return Mixture(
            weights={entry.spec.name: entry.spec.weight for entry in environments},
            owed=self._state.owed,
            ended=self._state.ended_groups,
            working_servers={session.key for session in self._fleet.working()},
        )

    def write_ahead(self, order: StepOrder) -> None:
        """Writes the file of the step that a client orders next, while its last pass is computed.

        If `form` gets another one, that takes the file's place.
        """
        if self._ahead is None and self._forming is None:
            name = batch_name(step := self._book.step, self._state.attempts[step])
            batch = FormedBatch(step, name, (), order)
            self._ahead = batch, self._tasks.create_task(self._write_file(batch))

    async def _write_file(self, batch: FormedBatch) -> kinds.StepBatch | RunFailed:
        try:
            # Encoding and the disk take long.
            return await asyncio.to_thread(self._journal.write_batch, batch.contents)
        except RunFailed as failure:
            return failure

    async def _write(self, batch: FormedBatch) -> FormedBatch | RunFailed:
        ahead = self._ahead
        self._ahead = None
        # A file that is not wanted any more must not be written later.
        record = await (self._write_file(batch) if ahead is None else ahead[1])
        if ahead is not None and ahead[0] != batch:
            record = await self._write_file(batch)
        if isinstance(record, RunFailed):
            return record
        try:
            if batch.given is not None and batch.given.after is not None:
                await batch.given.after.wait()
            self._journal.append(msgspec.structs.replace(record, owed={**batch.owed}))
            await asyncio.to_thread(self._journal.sync)
        except RunFailed as failure:
            # Returned, not raised: the caller raises it in the trainer's call, which fails the run.
            return failure
        self._ledger.batch_written()
        await self._receiver.acknowledge(t.trajectory_id for t in batch.trajectories)
        return batch

    def answered(self, report: pb.StepReport) -> PolicyVersion | None:
        """Returns the earlier answer to a repeated report, or None for a batch's first report.

        Raises ProtocolError if the trainer was not given that batch, or reported it differently.
        """
        if self.training is not None and _batch_of(self.training) == _batch_of(report):
            return None
        if self._reported is not None:
            earlier, version = self._reported
            if _identity(earlier) == _identity(report):
                return version
            if earlier.step == report.step:
                raise ProtocolError(
                    f"step {report.step + 1} was reported as {_describe(earlier)}, "
                    f"and now as {_describe(report)}"
                )
        training = "none"
        if self.training is not None:
            training = f"{self.training.batch_id} of step {self.training.version}"
        raise ProtocolError(
            f"a report of batch {report.batch_id} of step {report.step + 1}, "
            f"but the batch that the trainer was given is {training}"
        )

    def trained(self, report: pb.StepReport) -> Trained:
        """Notes that the trainer has made a version from its batch; call `answered` first.

        The caller must wait for `durable` before it answers the trainer.
        """
        batch = self.training
        self.training = None
        assert batch is not None
        assert _batch_of(batch) == _batch_of(report)
        earlier = self._state.steps.get(batch.step)
        version = self.identify(version_from_pb(report.version), report.weight_digest.hex())
        if earlier is None or earlier.version != version:
            step = kinds.Step(
                step=batch.step,
                version=version,
                digest=report.weight_digest.hex(),
                lags=sorted(batch.token_lags.items()),
                several=batch.num_with_several_versions,
                metrics={} if batch.given is None else dict(report.metrics),
            )
            self._journal.append(step)
        self._reported = report, version
        return Trained(batch, version, again=earlier is not None)

    def set_aside(
        self,
        fault: pb.DataFault,
        cause: str,
        *,
        most_in_a_row: int,
    ) -> SetAside | None:
        """Sets aside the batch that the trainer cannot train; the trainer's weights are unchanged.

        The groups that `fault` names, or all groups if it names none, are set aside. The other
        groups wait for the next batch of the step. The caller must wait for `durable` before it
        answers the trainer. Returns None for a repeated call. Raises ProtocolError if the trainer
        was not given that batch. Raises RunFailed if the step was made before, or if
        `most_in_a_row` batches in a row were set aside.
        """
        batch = self.training
        if batch is None or _batch_of(batch) != _batch_of(fault):
            aside = self._state.set_aside
            if aside and (aside[-1].batch_id, aside[-1].step) == _batch_of(fault):
                # The answer was lost.
                return None
            raise ProtocolError(
                f"the trainer was not given batch {fault.batch_id} of step {fault.step + 1}"
            )
        if batch.step in self._state.steps:
            raise RunFailed(
                f"step {batch.version} was made from batch {batch.batch_id} before, and cannot be "
                f"made again: {cause}"
            )
        in_a_row = self._state.set_aside_in_a_row
        # The client that ordered a step is told, and its loop goes on.
        if batch.given is None and in_a_row >= most_in_a_row:
            raise RunFailed(
                f"batch {batch.batch_id} of step {batch.version} cannot be trained: {cause}; "
                f"controller.max_set_aside_batches = {most_in_a_row} allows no other one, "
                f"{in_a_row} in a row were set aside before"
            )
        set_aside = SetAside.of(batch, fault.group_ids, cause, by="trainer")
        self._journal.append(set_aside.record())
        self.training = None
        self._ledger.take_back(set_aside.waiting)
        self._book.put_back(batch.step, set_aside.put_back, self._state.open_groups)
        return set_aside

    @property
    def untried(self) -> FormedBatch | None:
        """The trainer's batch if no version was ever made from it, else None."""
        batch = self.training
        return None if batch is None or batch.step in self._state.steps else batch

    async def durable(self) -> None:
        """Waits until all records journaled so far are on the disk."""
        await self._journal.durable()

    async def saved(self, report: pb.CheckpointReport, run: ControlledRun) -> None:
        """Journals a checkpoint; then a task removes old batches, if the settings say so."""
        version = version_from_pb(report.version)
        digest = report.weight_digest.hex()
        self._journal.append(kinds.Checkpoint(version=version, digest=digest, path=report.path))
        await self.durable()
        # A run that has failed does not wait for the task.
        if not (run.config.checkpoint.keep_batches or run.progress.has_failed):
            self._tasks.create_task(self._make_room(run))

    async def _make_room(self, run: ControlledRun) -> None:
        """Removes batches that no resume from one of the `keep_last` newest checkpoints needs.

        The newest batch stays, and those with groups that wait for another one.
        """
        checkpoints = run.config.run_dir / CHECKPOINTS
        state = self._state
        oldest_needed = min(
            [state.next_step - 1, *(batch.step for batch in state.put_back.values())]
        )

        def remove() -> int:
            first = first_needed_step(checkpoints, keep_last=run.config.checkpoint.keep_last)
            return self._journal.remove_batches(before=min(first, oldest_needed))

        try:
            number = await asyncio.to_thread(remove)
        except OSError as error:
            run.events.warn(f"{error.filename} cannot be removed: {error.strerror}")
            return
        if number:
            run.events.add(
                f"{number} batches were removed, which no resume needs (checkpoint.keep_batches)"
            )


def version_of(
    step: int,
    digest: str,
    recorded: JournaledStep | None,
    *,
    trainer: int,
    newest: int,
) -> PolicyVersion:
    """Returns the version of the weights with `digest`, made by `step` steps.

    `recorded` is the journal's record of that step. `trainer` is the incarnation of the weights
    before the step, `newest` the newest one of the run. If the digest is the recorded one, the
    recorded version is returned; another digest begins a new incarnation. Without a record, or if
    the record's incarnation is older than the trainer's, the version has the trainer's.
    """
    if recorded is None or recorded.version.incarnation < trainer:
        return PolicyVersion(trainer, step)
    if recorded.digest == digest:
        return recorded.version
    return PolicyVersion(newest + 1, step)


def _batch_of(message: FormedBatch | pb.StepReport | pb.DataFault) -> tuple[str, int]:
    return message.batch_id, message.step


def _identity(report: pb.StepReport) -> tuple[object, ...]:
    version = version_from_pb(report.version)
    return *_batch_of(report), version, report.weight_digest


def _describe(report: pb.StepReport) -> str:
    version = version_from_pb(report.version)
    digest = report.weight_digest.hex()
    return f"version {version} with digest {digest} from batch {report.batch_id}"
