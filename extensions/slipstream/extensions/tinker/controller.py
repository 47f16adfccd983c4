"""A client's own loop: operations on the run's model, in their order, each carried out once.

Consumes: operations of the HTTP process, reports of trainer and servers. Produces: passes and steps
for the trainer, publishes, leases of prompts, results. Waits for: the turn of each operation, and
for who carries it out. Unblocked by: the run's signal.

Training operations are on the disk before they begin, and their results before they are told.
Samples are in memory: a client asks again for one that a restart has lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.types import GroupId, Status, Trajectory
from slipstream.extensions.tinker.store import OperationStore
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.groups import Group, RawPrompt
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.part import OrderTimes, Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.state import RecordedBatch
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import CallContext, ServerSession
from slipstream.learner.controller.trajectories.batch import SetAside, StepOrder
from slipstream.learner.controller.trajectories.batches import Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.checkpoints import complete_steps
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc, trainer_pb2, trajectory_pb2

# The name of the environment in leases of prompts.
CLIENT = "client"
# Most training operations of a session, and most samples, that may wait: others are sent again.
MAX_WAITING = 4096
# Most samples that are kept for clients that have not asked for them.
MAX_KEPT = 65536
LOOK_S = 0.5
# The version of names that stand for whatever is served.
NEWEST = -1


@dataclass(eq=False)
class Entry:
    """One operation and its result."""

    operation: pb.Operation
    # Its number on the disk; None for a sample.
    place: int | None = None
    # Empty again when the disk has it: a long loop has more results than memory.
    result: pb.OperationResult = field(default_factory=pb.OperationResult)
    # Set when the result may be told.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    # Whether the trainer, or a server, has it.
    is_begun: bool = False
    groups: dict[GroupId, Group] = field(default_factory=dict)
    finished: list[Trajectory] = field(default_factory=list)
    num_leased: int = 0

    @property
    def kind(self) -> str:
        """The name of the operation's field."""
        return self.operation.WhichOneof("operation") or ""


class Operations(Part, operations_pb2_grpc.OperationServiceServicer):
    """Carries out the operations of one stream at a time, and samples of any number at once.

    Of a stream only the operation whose turn it is is begun: a pass, save or step becomes an order
    of the trainer, a publish unpins the servers. All servers are pinned otherwise, so that they
    serve what was published last.
    """

    def __init__(
        self, run: Run, books: Books, intake: Intake, publisher: Publisher, scheduler: Scheduler
    ) -> None:
        self._run, self._progress, self._fleet = run, run.progress, books.fleet
        self._book, self._journal, self._state = books.leases, books.journal, books.state
        self._intake, self._publisher, self._scheduler = intake, publisher, scheduler
        self._store = OperationStore(run.config.run_dir / "operations")
        self._checkpoints = run.config.run_dir / CHECKPOINTS
        # Whether servers sample by version 0, too, whatever they serve.
        self._keeps_start = run.config.lora.publishes_adapters
        self._entries: dict[str, Entry] = {}
        self._num_stored = 0
        # The stream that has the model, and the number of its next operation.
        self._stream, self._next = "", 0
        # Operations whose turn has not come, by stream and number, and first ones of new streams.
        self._waiting: dict[tuple[str, int], Entry] = {}
        self._first: list[Entry] = []
        self._current: Entry | None = None
        # The passes since the newest step whose gradients the trainer holds.
        self._passes: list[Entry] = []
        # The operation that ended last; its result may not be on the disk yet.
        self._before: Entry | None = None
        # The version of each named publish and checkpoint.
        self._named: dict[str, int] = {"": 0}
        # Samples that are not over, in order, and those that the current publish waits for.
        self._samples: list[Entry] = []
        self._kept: deque[str] = deque()
        self._before_publish: list[Entry] = []
        self._lock = asyncio.Lock()
        self._ends: asyncio.Queue[Entry] = asyncio.Queue()

    def serve(self, server: grpc.aio.Server) -> None:
        """Adds the service that the HTTP process calls."""
        operations_pb2_grpc.add_OperationServiceServicer_to_server(self, server)

    async def Submit(self, request: pb.Operation, context: CallContext) -> pb.OperationReceipt:  # noqa: N802
        """Adds an operation unless its id is known; it is on the disk, unless it is a sample."""
        async with self._lock:
            if request.id not in self._entries:
                if cause := self._flood(request):
                    code = grpc.StatusCode.RESOURCE_EXHAUSTED
                    await abort(context, code, cause, Reason.TOO_MANY_CALLS)
                entry = Entry(request)
                if entry.kind == "sample":
                    self._add_sample(entry)
                else:
                    entry.place, self._num_stored = self._num_stored, self._num_stored + 1
                    await asyncio.to_thread(self._store.write, entry.place, request)
                    self._queue(entry)
                self._entries[request.id] = entry
                self._run.signal.notify()
        return pb.OperationReceipt()

    def _flood(self, request: pb.Operation) -> str:
        """Returns why the client of `request` must wait, or "" if it need not."""
        session = (request.stream or request.id).partition(":")[0]
        waiting = self._samples if request.HasField("sample") else self._waiting.values()
        number = sum(one.operation.id.startswith(f"{session}:") for one in waiting)
        if number < MAX_WAITING:
            return ""
        return f"{number} requests of session {session} wait already: send more when some are done"

    async def Await(self, request: pb.AwaitRequest, context: CallContext) -> pb.OperationResult:  # noqa: N802
        """Returns the result of an operation, or one that is not done after the limit."""
        entry = self._entries.get(request.id)
        if entry is None:
            return pb.OperationResult(is_unknown=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.limit_s):
                await entry.ended.wait()
        if not entry.ended.is_set():
            return pb.OperationResult()
        if entry.place is None:
            return entry.result
        return await asyncio.to_thread(self._store.result, entry.place)

    # Turns.

    def restore(self, history: RunHistory) -> None:
        """Takes over operations and results on the disk, and results that a kill has lost."""
        formed = self._given_of(history.batches.get(history.next_step - 1))
        is_made = history.version.step == history.next_step
        waiting = (batch for batch in history.set_aside if batch.step == history.next_step)
        aside = {self._given_of(batch): batch.batch_id for batch in waiting}
        entries = []
        for place, operation, result in self._store.read():
            entry = Entry(operation, place, result)
            self._num_stored = place + 1
            self._entries[operation.id] = entry
            entries.append(entry)
            # The trainer has, or gets, the batch of this step; the step may be journaled.
            entry.is_begun = operation.id == formed
            if result.is_done:
                entry.ended.set()
            elif operation.id in aside:
                result.error = f"batch {aside[operation.id]} was set aside"
                self._store_end(entry)
            elif entry.is_begun and is_made:
                result.step = history.version.step
                self._store_end(entry)
        done = [entry for entry in entries if entry.result.is_done]
        by_turn = {(one.operation.stream, one.operation.number): one for one in done}
        for first in done:
            if first.operation.number == 0 and not first.result.error:
                self._take_over(first.operation.stream)
                # Requests may have come in another order.
                while ended := by_turn.get((self._stream, self._next)):
                    self._note_end(ended)
        for entry in entries:
            if not entry.result.is_done:
                self._queue(entry)
            elif entry.ended.is_set():
                entry.result = pb.OperationResult()

    def _given_of(self, batch: RecordedBatch | None) -> str:
        """Returns the id of the operation that a batch carries out, or "" without its file."""
        if batch is None or (batch.step, batch.attempt) not in self._journal.kept_batches():
            return ""
        message = self._journal.read_batch(batch.step, batch.crc32, batch.attempt)
        return message.header.given.id

    def _queue(self, entry: Entry) -> None:
        operation = entry.operation
        if operation.number == 0:
            self._first.append(entry)
        elif operation.stream != self._stream and operation.stream not in self._coming:
            self._fail(
                entry,
                f"model {operation.stream} is not trained by this run any more: a newer one is",
            )
        else:
            self._waiting[operation.stream, operation.number] = entry

    @property
    def _coming(self) -> set[str]:
        """The streams that wait for the model."""
        return {entry.operation.stream for entry in self._first}

    def _take_turn(self) -> None:
        """Begins the next operation of the stream, or else a new stream, which takes the model."""
        entry = self._waiting.pop((self._stream, self._next), None)
        if entry is None and self._first:
            entry = self._first.pop(0)
            if cause := self._refusal(entry):
                self._fail(entry, cause)
                entry = None
            else:
                self._take_over(entry.operation.stream)
            kept = {self._stream, *self._coming}
            for stream, number in [key for key in self._waiting if key[0] not in kept]:
                self._queue(self._waiting.pop((stream, number)))
        if entry is not None:
            self._current = entry
            self._before_publish = [one for one in self._samples if not self._is_newest(one)]

    def _refusal(self, first: Entry) -> str:
        """Returns why the stream of its `first` operation may not have the model, or ""."""
        version = self._progress.version.step
        if first.kind == "begin" and version:
            return (
                f"the model was trained for {version} steps already: load a saved state, or start "
                "a run with another run.name"
            )
        if first.kind == "load":
            return self._unloadable(first.operation.load.name)
        return first.operation.refused.cause

    def _unloadable(self, name: str) -> str:
        """Returns why the state `name` cannot be loaded, or "" if it can, or if there is none."""
        step = self._named.get(name)
        if step is None:
            return f"{name} is no state that this run saved"
        if not step and self._progress.version.step:
            return f"{name} is version 0, with which only a run of another run.name begins"
        if step and step not in complete_steps(self._checkpoints):
            return f"the checkpoint of {name} was removed, as checkpoint.keep_last says"
        return ""

    def _take_over(self, stream: str) -> None:
        self._stream, self._next, self._passes = stream, 0, []

    def _note_end(self, entry: Entry) -> None:
        """Moves on behind the operation whose turn it was, which is done."""
        operation, result = entry.operation, entry.result
        self._next, self._before = operation.number + 1, entry
        if entry.kind in ("step", "load"):
            self._passes = []
        if result.error:
            return
        if entry.kind == "compute" and operation.compute.backward:
            self._passes.append(entry)
        elif entry.kind in ("publish", "save"):
            is_newest = operation.publish.in_flight
            self._named[getattr(operation, entry.kind).name] = NEWEST if is_newest else result.step

    def _end(self, entry: Entry, result: pb.OperationResult) -> None:
        """Ends an operation, whose result is told once it is on the disk."""
        entry.result = result
        self._store_end(entry)
        if entry is self._current:
            self._current = None
            held = self._passes
            self._note_end(entry)
            over = held if entry.kind in ("step", "load") else [entry]
            for each in over:
                if each.kind == "compute" and each not in self._passes:
                    # A step's batch holds the sequences of its passes.
                    each.operation.compute.ClearField("sequences")
                    self._ends.put_nowait(each)
        self._run.signal.notify()

    def _store_end(self, entry: Entry) -> None:
        entry.result.is_done = True
        if entry.kind in ("publish", "save", "load"):
            entry.result.name = getattr(entry.operation, entry.kind).name
        self._ends.put_nowait(entry)

    def _fail(self, entry: Entry, cause: str) -> None:
        self._end(entry, pb.OperationResult(error=cause))

    def tasks(self) -> Tasks:
        """Returns the tasks that give turns and write results."""
        return {"operations": self._turns(), "results": self._write_results()}

    async def _write_results(self) -> None:
        while True:
            entry = await self._ends.get()
            if entry.ended.is_set():
                assert entry.place is not None
                await asyncio.to_thread(self._store.write, entry.place, entry.operation)
                continue
            if entry.place is not None:
                await asyncio.to_thread(self._store.end, entry.place, entry.result)
                entry.result = pb.OperationResult()
            entry.ended.set()
            self._run.signal.notify()

    async def _turns(self) -> None:
        while True:
            if not self._progress.is_over:
                self._look()
            await self._run.signal.changes(LOOK_S)

    def _look(self) -> None:
        if self._current is None:
            self._take_turn()
        self._carry_out()
        self._collect()
        self._lease()
        if self._current is None or self._current.kind != "publish":
            for session in self._fleet.serving():
                if session.key not in self._publisher.pinned:
                    self._publisher.pin(session)

    def _carry_out(self) -> None:
        """Carries out what needs no trainer, and looks after a publish."""
        entry = self._current
        if entry is None or not self._progress.has_trainer:
            return
        version = self._progress.version.step
        match entry.kind:
            case "begin":
                self._end(entry, pb.OperationResult(step=version))
            case "refused":
                self._fail(entry, entry.operation.refused.cause)
            case "publish":
                self._publish(entry)
            # Nothing is written of version 0, the model of the settings.
            case "save" if self._state.checkpoint.step == version:
                self._end(entry, pb.OperationResult(step=version))
            case "load" if not entry.is_begun:
                if cause := self._unloadable(entry.operation.load.name):
                    self._fail(entry, cause)
                elif not version:
                    self._end(entry, pb.OperationResult())

    def _publish(self, entry: Entry) -> None:
        if any(each in self._samples for each in self._before_publish):
            return
        sessions = [s for s in self._fleet.sessions.values() if not s.is_leaving]
        self._publisher.pinned.clear()
        if sessions and all(s.is_serving and s.version == self._progress.version for s in sessions):
            self._end(entry, pb.OperationResult(step=self._progress.version.step))

    # Orders of the trainer.

    def order(self, trainer: trainer_pb2.NextRequest) -> trainer_pb2.Directive | None:
        """Returns the pass, or the save, whose turn it is; a trainer that asks has none."""
        entry = self._current
        if entry is not None and entry.kind == "compute":
            return trainer_pb2.Directive(compute=entry.operation.compute)
        if entry is not None and entry.kind == "save":
            return trainer_pb2.Directive(save=trainer_pb2.SaveOrder())
        return None

    def waits_for(self) -> str:
        """Returns the operation that is under way, or that the client has not sent."""
        if self._current is not None:
            return f"the end of the operation {self._current.operation.id}"
        if any(stream == self._stream for stream, _ in self._waiting):
            return f"operation {self._next} of {self._stream}, behind which later ones wait"
        return "the next training operation of the client"

    def computed(self, report: trainer_pb2.PassReport) -> None:
        """Ends the pass of the report; a report that is repeated ends none."""
        entry = self._current
        if entry is not None and entry.kind == "compute" and entry.operation.id == report.id:
            step = self._progress.version.step
            self._end(entry, pb.OperationResult(compute=report, error=report.error, step=step))

    def saved(self, step: int) -> None:
        """Ends the save whose turn it is."""
        entry = self._current
        if entry is not None and entry.kind == "save" and step == self._progress.version.step:
            self._end(entry, pb.OperationResult(step=step))

    def next_step(self) -> StepOrder | None:
        """Returns the step whose turn it is, once; the journal has it from then on."""
        entry = self._current
        if entry is None or entry.is_begun or entry.kind not in ("step", "load"):
            return None
        if self._before is not None and not self._before.ended.is_set():
            # After a kill the journal tells the result of its newest step alone.
            return None
        operation = entry.operation
        if entry.kind == "step":
            passes = tuple(each.operation.compute for each in self._passes)
            entry.is_begun = True
            return StepOrder(operation.id, operation.step, passes)
        if not self._progress.version.step or self._unloadable(operation.load.name):
            return None
        step, entry.is_begun = self._named[operation.load.name], True
        without = operation.load.without_optimizer
        return StepOrder(
            operation.id, trainer_pb2.LoadedState(step=step, without_optimizer=without)
        )

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, orders: Sequence[OrderTimes]
    ) -> None:
        """Ends the step of the report."""
        entry, given = self._current, trained.batch.given
        if entry is not None and given is not None and entry.operation.id == given.id:
            step = trained.version.step
            self._end(entry, pb.OperationResult(step=step, metrics=report.metrics))

    def set_aside(self, found: SetAside) -> None:
        """Ends the step that could not be made; its passes are gone."""
        entry, given = self._current, found.batch.given
        if entry is not None and given is not None and entry.operation.id == given.id:
            self._fail(entry, found.cause)

    # Samples.

    def _add_sample(self, entry: Entry) -> None:
        self._samples.append(entry)
        self._kept.append(entry.operation.id)
        while len(self._kept) > MAX_KEPT and self._entries[self._kept[0]].ended.is_set():
            del self._entries[self._kept.popleft()]

    def _lease(self) -> None:
        """Leases prompts to servers of their version, as far as these have room."""
        for entry in list(self._samples):
            sample = entry.operation.sample
            publishes = self._current is not None and self._current.kind == "publish"
            if publishes and entry not in self._before_publish and not self._is_newest(entry):
                continue
            if sample.name not in self._named:
                self._over(entry, f"{sample.name} is no name of a publish of this run")
                continue
            sessions = self._sessions(sample)
            if not sessions and (cause := self._gone(sample)):
                self._over(entry, cause)
            while entry.num_leased < sample.num_samples and sessions:
                session = max(sessions, key=self._scheduler.room)
                if self._scheduler.room(session) < 1 or not self._scheduler.may_send(1):
                    return
                self._send(entry, session)

    def _is_newest(self, entry: Entry) -> bool:
        return self._named.get(entry.operation.sample.name) == NEWEST

    def _sessions(self, sample: pb.Sample) -> list[ServerSession]:
        step, serving = self._named[sample.name], self._fleet.serving()
        if step == NEWEST or (not step and self._keeps_start):
            return serving
        return [one for one in serving if one.version is not None and one.version.step == step]

    def _gone(self, sample: pb.Sample) -> str:
        """Returns why no server will sample by the version of `sample`, or "" if one may."""
        step, served = self._named[sample.name], self._fleet.serving()
        if not served or step == self._progress.version.step:
            return ""
        newest = max(session.version.step for session in served if session.version is not None)
        return (
            f"version {step} is not served any more, version {newest} is: "
            "save_weights_and_get_sampling_client makes a client of the newest weights"
        )

    def _send(self, entry: Entry, session: ServerSession) -> None:
        sample = entry.operation.sample
        assert session.version is not None
        sample.sampling.by_start = self._keeps_start and not self._named[sample.name]
        prompt = RawPrompt(sample.prompt_token_ids, sample.sampling)
        group = self._book.lease_prompt(CLIENT, prompt, session.key, session.version.step)
        entry.groups[group.group_id] = group
        entry.num_leased += 1
        self._scheduler.send_evaluation(session, [group])

    def _collect(self) -> None:
        for entry in list(self._samples):
            for group_id, group in list(entry.groups.items()):
                if group.is_complete:
                    entry.finished.append(group.finished[0])
                    self._intake.end_evaluated(group)
                elif group_id not in self._book.groups:
                    self._over(entry, "the engine could not sample the reply")
                    break
                elif group.holder is None:
                    # The server handed the lease back, or is lost: another one samples anew.
                    self._intake.start_afresh(group)
                    entry.num_leased -= 1
                else:
                    continue
                del entry.groups[group_id]
            if len(entry.finished) == entry.operation.sample.num_samples:
                self._over(entry)

    def _over(self, entry: Entry, error: str = "") -> None:
        """Ends a sample; with an error, what servers still run for it is withdrawn."""
        self._samples.remove(entry)
        if error:
            self._intake.withdraw(list(entry.groups.values()), error)
            entry.groups.clear()
        found = () if error else map(_sampled, entry.finished)
        self._end(entry, pb.OperationResult(error=error, samples=found))


def _sampled(trajectory: Trajectory) -> pb.Sampled:
    start = trajectory.run_lengths[0]
    return pb.Sampled(
        token_ids=trajectory.token_ids[start:].astype("<u4").tobytes(),
        logprobs=trajectory.behavior_logprobs.astype("<f4").tobytes(),
        truncated=trajectory.status is Status.TRUNCATED,
        version_spans=[
            trajectory_pb2.VersionSpan(length=span.length, version=version_to_pb(span.version))
            for span in trajectory.version_spans
        ],
        prompt_logprobs=trajectory.prompt_logprobs,
    )
