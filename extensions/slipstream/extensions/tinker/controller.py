"""A client's own loop: operations on the run's model, in their order, each carried out once.

Consumes: operations of the HTTP process, reports of trainer and servers. Produces: passes and steps
for the trainer, publishes, leases of prompts, results. Waits for: the turn of each operation, and
for who carries it out. Unblocked by: the run's signal.

Training operations are on the disk before they begin, and their results before they are told.
Samples are in memory: a client asks again for one that a restart has lost.

Each stream of operations has a model: the run's only one, which the newest stream takes over, or,
with `lora.adapters`, one of these adapters. Streams have turns one after another.
"""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.proto import serialize_length_prefixed
from slipstream.core.errors import ProtocolError
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.waits import within
from slipstream.extensions.tinker.models import Entry, Model, Models, Named
from slipstream.extensions.tinker.samples import Samples
from slipstream.extensions.tinker.store import OperationStore
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.state import RecordedBatch
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import CallContext, Outbox
from slipstream.learner.controller.trajectories.batch import SetAside, StepOrder, Trained
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.checkpoints import complete_steps, write_kept
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc, trainer_pb2

# Most training operations of a session that may wait: others are sent again.
MAX_WAITING = 4096
# Most samples that are kept for clients that have not asked for them.
MAX_KEPT = 65536
# Operations that have ended stay at least until so many others have, too.
KEPT = 1024
LOOK_S = 0.5
# The beginning of an encoded directive whose pass follows.
_COMPUTE = bytes([trainer_pb2.Directive.COMPUTE_FIELD_NUMBER << 3 | 2])


class Operations(Part, operations_pb2_grpc.OperationServiceServicer):
    """Carries out one training operation at a time, and samples of any number at once.

    A pass, save or step whose turn it is becomes an order of the trainer, a publish unpins the
    servers. All servers are pinned otherwise, so that they serve what was published last.
    """

    def __init__(
        self,
        run: Run,
        books: Books,
        intake: Intake,
        publisher: Publisher,
        scheduler: Scheduler,
        former: BatchFormer,
    ) -> None:
        self._run, self._progress, self._fleet = run, run.progress, books.fleet
        self._journal, self._state, self._publisher = books.journal, books.state, publisher
        self._former = former
        self._store = OperationStore(run.config.run_dir / "operations")
        self._checkpoints = run.config.run_dir / CHECKPOINTS
        self._models = Models(run.config.lora)
        self._entries: dict[str, Entry] = {}
        self._samples = Samples(
            run, books, intake, scheduler, self._models, self._entries, end=self._end
        )
        self._num_stored = 0
        self._lock = asyncio.Lock()
        # Operations whose turn has not come, by stream and number, and first ones of new streams.
        self._waiting: dict[tuple[str, int], Entry] = {}
        self._first: list[Entry] = []
        # That whose turn it is, and that which the trainer had when the controller started.
        self._current: Entry | None = None
        self._resumed: Entry | None = None
        # The operation that ended last; its result may not be on the disk yet.
        self._before: Entry | None = None
        # What is to be written: results, and operations that have lost their sequences.
        self._ends: asyncio.Queue[Entry] = asyncio.Queue()
        # Operations that have ended since this start.
        self._num_over = 0

    def serve(self, server: grpc.aio.Server) -> None:
        """Adds the service that the HTTP process calls."""
        operations_pb2_grpc.add_OperationServiceServicer_to_server(self, server)

    def tasks(self) -> Tasks:
        """Returns the tasks that give turns and write results."""
        return {"operations": self._turns(), "results": self._write_results()}

    async def Submit(self, request: pb.Operation, context: CallContext) -> pb.OperationReceipt:  # noqa: N802
        """Adds a training operation, which is on the disk then, unless its id is known."""
        if request.HasField("sample"):
            raise ProtocolError(f"{request.id} is a sample, which goes on the stream of samples")
        # A caller that goes leaves nothing on the disk that is not known: it would be there twice.
        if cause := await asyncio.shield(self._add(request)):
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, cause, Reason.TOO_MANY_CALLS)
        return pb.OperationReceipt()

    async def _add(self, request: pb.Operation) -> str:
        """Adds an operation unless its id is known; returns why its client must wait, or ""."""
        session = request.stream.partition(":")[0]
        async with self._lock:
            if request.id in self._entries:
                return ""
            number = sum(stream.partition(":")[0] == session for stream, _ in self._waiting)
            if number >= MAX_WAITING:
                return f"{number} requests of session {session} wait: send more when some are done"
            place, self._num_stored = self._num_stored, self._num_stored + 1
            await asyncio.to_thread(self._store.write, place, request)
            entry = self._entries[request.id] = Entry(request, place)
            self._queue(entry)
            self._write_ahead()
            self._run.signal.notify()
        return ""

    async def Keep(self, request: pb.KeepRequest, context: CallContext) -> pb.KeepReceipt:  # noqa: N802
        """Changes how long the name of a publish or save holds, or deletes it."""
        async with self._lock:
            named = self._models.named.get(request.name)
            if named is None or (entry := named.entry) is None or entry.place is None:
                return pb.KeepReceipt(is_unknown=True)
            entry.operation.kept.CopyFrom(request.kept)
            await asyncio.to_thread(self._store.write, entry.place, entry.operation)
            if request.kept.is_deleted and self._models.named.get(request.name) is named:
                del self._models.named[request.name]
            write_kept(self._checkpoints, self._models.kept())
        return pb.KeepReceipt()

    async def Beat(self, request: pb.BeatRequest, context: CallContext) -> pb.OperationReceipt:  # noqa: N802
        for model in self._models.by_stream.values():
            if model.session == request.session:
                model.touch()
        return pb.OperationReceipt()

    async def Sample(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.Operation], context: CallContext
    ) -> AsyncIterator[pb.OperationResult]:
        """Takes samples, and yields their results as they come, until the caller goes."""
        outbox = Outbox[pb.OperationResult]()
        reading = self._samples.take(request_iterator, outbox)
        async with contextlib.aclosing(outbox.messages(reading)) as results:
            async for result in results:
                yield result

    async def Await(self, request: pb.AwaitRequest, context: CallContext) -> pb.OperationResult:  # noqa: N802
        """Returns the result of an operation, or one that is not done after the limit."""
        entry = self._entries.get(request.id)
        if entry is None:
            return pb.OperationResult(is_unknown=True)
        if not await within(request.limit_s, entry.ended.wait()):
            return pb.OperationResult()
        result = entry.result
        if entry.place is not None:
            result = await asyncio.to_thread(self._store.result, entry.place)
        entry.is_told = True
        return result

    def restore(self, history: RunHistory) -> None:
        """Takes over operations and results on the disk, and results that a kill has lost."""
        formed = self._given_of(history.batches.get(history.next_step - 1))
        is_made = history.version.step == history.next_step
        waiting = (batch for batch in history.set_aside if batch.step == history.next_step)
        aside = {self._given_of(batch).id: batch.batch_id for batch in waiting}
        entries = []
        self._store.clean()
        for place, operation, result, _ in self._store.read():
            entry = self._entries[operation.id] = Entry(operation, place, result)
            entries.append(entry)
            self._num_stored = place + 1
            # The trainer has, or gets, the batch of this step; the step may be journaled.
            entry.is_begun = operation.id == formed.id
            if result.is_done:
                entry.ended.set()
            elif operation.id in aside:
                self._end(entry, error=f"batch {aside[operation.id]} was set aside")
            elif entry.is_begun and is_made:
                entry.is_made = True
                if entry.kind != "publish":
                    adapter = None if operation.number else formed.adapter
                    made = {"step": history.version.step, "metrics": history.metrics}
                    self._end(entry, adapter=adapter, **made)
        # Models in the order in which they came, then their operations in that of their numbers.
        models: dict[str, Model] = {}
        done = (entry for entry in entries if entry.result.is_done)
        for entry in sorted(done, key=lambda one: one.operation.number):
            stream = entry.operation.stream
            if entry.kind == "finish":
                self._models.finished[entry.operation.stream] = entry
                continue
            if entry.operation.number == 0 and not entry.result.error:
                models[stream] = self._models.take(stream, entry.result.adapter)
            if model := models.get(stream):
                self._note_end(model, entry)
        for entry in entries:
            if entry.ended.is_set():
                # A client that was not told of it asks soon.
                entry.step, entry.is_told = entry.result.step, True
                entry.result = pb.OperationResult()
            elif entry.is_begun and not entry.result.is_done:
                self._resumed = entry
                if entry.operation.number == 0:
                    self._models.take(entry.operation.stream, formed.adapter)
            elif not entry.result.is_done:
                self._queue(entry)

    def _given_of(self, batch: RecordedBatch | None) -> trainer_pb2.GivenStep:
        """Returns the order that a batch carries out, an empty one without its file."""
        if batch is None or (batch.step, batch.attempt) not in self._journal.kept_batches():
            return trainer_pb2.GivenStep()
        return self._journal.read_batch(batch).header.given

    def _queue(self, entry: Entry) -> None:
        """Lets an operation wait for its turn, or ends it if that does not come."""
        operation = entry.operation
        model = self._models.by_stream.get(operation.stream)
        if entry.kind == "finish":
            self._models.finished[entry.operation.stream] = entry
            # Nobody asks for its result.
            entry.is_told = True
            self._end(entry)
        elif operation.number == 0:
            self._first.append(entry)
        elif model is None and all(one.operation.stream != operation.stream for one in self._first):
            cause = f"model {operation.stream} is not trained by this run any more: a newer one is"
            self._end(entry, error=cause)
        elif model is not None and operation.number < model.next:
            cause = f"{operation.id} was carried out; its result is not kept any more"
            self._end(entry, error=cause)
        else:
            self._waiting[operation.stream, operation.number] = entry
            if model is not None:
                model.touch()

    def _take_turn(self) -> None:
        """Begins the next operation of a stream, or of a new one, which gets a model."""
        entry, self._resumed = self._resumed, None
        if entry is None and self._models.are_several:
            entry = self._take_first()
        for model in self._models.by_stream.values():
            entry = entry or self._waiting.pop((model.stream, model.next), None)
        entry = entry or self._take_first()
        if entry is None:
            return
        self._current, model = entry, self._model_of(entry)
        self._models.turn(model)
        if entry.kind == "compute":
            entry.operation.compute.adapter.CopyFrom(model.adapter)
        elif entry.kind == "publish":
            self._samples.await_before(model)
        elif self._models.newest(entry.operation.load.name) is model:
            entry.is_made = True
        # Whoever woke before, trainer or loop, saw no operation.
        self._run.signal.notify()

    def _take_first(self) -> Entry | None:
        """Returns the first operation of a stream that gets a model, or None if there is none."""
        if not self._first:
            return None
        for model in self._models.by_stream.values():
            if (model.stream, model.next) in self._waiting:
                # It waits for its turn, so it is not silent.
                model.touch()
        entry = self._first.pop(0)
        operation, version = entry.operation, self._progress.version.step
        adapter, cause = operation.begin.adapter, ""
        match entry.kind:
            case "begin":
                if version and not self._models.are_several:
                    cause = (
                        f"the model was trained for {version} steps already: load a saved state, "
                        "or start a run with another run.name"
                    )
            case "load":
                name = operation.load.name
                cause = self._unloadable(name)
                if newest := self._models.newest(name):
                    adapter, entry.is_made = newest.adapter, True
                elif not cause and (of := self._models.named[name].model):
                    adapter = trainer_pb2.Adapter(rank=of.adapter.rank, alpha=of.adapter.alpha)
            case "refused":
                cause = operation.refused.cause
            case _:
                cause = f"{operation.id} has number 0, which is that of a model's beginning"
        if not cause and not entry.is_made:
            cause = self._models.refusal()
        if cause:
            self._end(entry, error=cause)
        else:
            self._models.take(operation.stream, adapter)
        self._queue_anew()
        return None if cause else entry

    def _queue_anew(self) -> None:
        """Ends the operations whose stream has no model any more."""
        coming = {entry.operation.stream for entry in self._first}
        for stream, number in [*self._waiting]:
            if stream not in self._models.by_stream and stream not in coming:
                self._queue(self._waiting.pop((stream, number)))

    def _model_of(self, entry: Entry) -> Model:
        return self._models.by_stream[entry.operation.stream]

    def _unloadable(self, name: str, model: Model | None = None) -> str:
        """Returns why `model`, or a new one, cannot load the state `name`, or "" if it can."""
        newest = self._models.newest(name)
        if newest is not None and model in (newest, None):
            return ""
        named = self._models.named.get(name)
        if named is None:
            return f"{name} is no state that this run saved"
        if not named.step and self._progress.version.step:
            return f"{name} is version 0, with which only a run of another run.name begins"
        if named.step and named.step not in complete_steps(self._checkpoints):
            return f"the checkpoint of {name} is gone: its ttl was over, or somebody removed it"
        if model is not None and named.model is not None:
            theirs, ours = named.model.adapter, model.adapter
            if (theirs.rank, theirs.alpha) != (ours.rank, ours.alpha):
                return (
                    f"{name} has rank {theirs.rank} and alpha {theirs.alpha:g}, this model has "
                    f"{ours.rank} and {ours.alpha:g}: create a training client from the state"
                )
        return ""

    def _end(self, entry: Entry, **result: Any) -> None:  # noqa: ANN401 - fields of a message
        """Ends an operation with this result, which is told once it is on the disk."""
        entry.result = pb.OperationResult(is_done=True, **result)
        if entry.kind in ("publish", "save", "load"):
            entry.result.name = getattr(entry.operation, entry.kind).name
        self._ends.put_nowait(entry)
        if entry is self._current:
            self._current, model = None, self._model_of(entry)
            is_first, held = entry.operation.number == 0, model.passes
            if is_first:
                entry.result.adapter.CopyFrom(model.adapter)
            self._note_end(model, entry)
            if is_first and entry.result.error:
                del self._models.by_stream[model.stream]
                self._queue_anew()
            model.touch()
            for each in held if entry.kind in ("step", "load") else [entry]:
                if each.kind == "compute" and each not in model.passes:
                    # A step's batch holds the sequences of its passes.
                    each.operation.compute.ClearField("sequences")
                    self._ends.put_nowait(each)
        self._run.signal.notify(gathered=entry.place is None)

    def _note_end(self, model: Model, entry: Entry) -> None:
        """Moves on behind the operation whose turn it was, which is done."""
        operation, result, is_new = entry.operation, entry.result, not entry.ended.is_set()
        model.next, model.last = operation.number + 1, entry
        if is_new:
            self._before = entry
        if operation.number == 0:
            model.first = entry
            if operation.HasField("max_staleness"):
                model.max_staleness = operation.max_staleness
        if entry.kind in ("step", "load"):
            model.passes = []
            model.steps += not result.error
        # Results on the disk know of steps whose own results are gone.
        model.steps = result.steps = max(model.steps, result.steps)
        if result.error:
            return
        # Without its sequences a step before a restart had it.
        if operation.compute.backward and operation.compute.sequences:
            operation.compute.adapter.CopyFrom(model.adapter)
            model.passes.append(entry)
        elif entry.kind in ("publish", "save"):
            name = getattr(operation, entry.kind).name
            if operation.kept.is_deleted:
                self._models.named.pop(name, None)
            else:
                in_flight = operation.publish.in_flight
                self._models.named[name] = Named(result.step, model, entry, in_flight=in_flight)
            if entry.kind == "publish":
                model.publish(result.step)
            elif is_new:
                # Before another checkpoint is written, which removes old ones.
                write_kept(self._checkpoints, self._models.kept())

    async def _write_results(self) -> None:
        while True:
            entry = await self._ends.get()
            if entry.ended.is_set():
                assert entry.place is not None
                # Without its sequences, unless it went meanwhile.
                if entry.operation.id in self._entries:
                    await asyncio.to_thread(self._store.write, entry.place, entry.operation)
                continue
            if entry.place is not None:
                await asyncio.to_thread(self._store.end, entry.place, entry.result)
                entry.step, entry.result = entry.result.step, pb.OperationResult()
            # Behind those that ended before it.
            self._entries[entry.operation.id] = self._entries.pop(entry.operation.id)
            entry.ended.set()
            entry.tell()
            self._num_over += 1
            if self._num_over % KEPT == 0:
                await self._forget()
            self._run.signal.notify(gathered=entry.place is None)

    async def _forget(self) -> None:
        """Removes what is spent: told, covered by a checkpoint, and not needed after a restart.

        A sample need not be covered; of those that nobody has asked for the oldest go.
        """
        old = [entry for entry in self._entries.values() if entry.ended.is_set()][:-KEPT]
        covered = self._state.checkpoint.step
        lasting = self._models.lasting(complete_steps(self._checkpoints))
        spent = [e for e in old if e.is_told and e.step <= covered and e not in lasting]
        spent += [e for e in old if e.place is None and not e.is_told][:-MAX_KEPT]
        for entry in spent:
            del self._entries[entry.operation.id]
        places = [entry.place for entry in spent if entry.place is not None]
        await asyncio.to_thread(self._store.remove, places)

    async def _turns(self) -> None:
        while True:
            if not self._progress.is_over:
                self._look()
            await self._run.signal.changes(LOOK_S)

    def _look(self) -> None:
        """Begins an operation, carries out what needs no trainer, and looks after samples."""
        if self._current is None:
            self._take_turn()
        if self._current is not None and self._progress.has_trainer:
            self._carry_out(self._current)
        self._samples.collect()
        if self._current is not None and self._current.kind == "publish":
            self._samples.lease(self._model_of(self._current))
            return
        self._samples.lease(None)
        for session in self._fleet.serving():
            if session.key not in self._publisher.pinned:
                self._publisher.pin(session)

    def _carry_out(self, entry: Entry) -> None:
        version, model = self._progress.version.step, self._model_of(entry)
        match entry.kind:
            case "begin" if not self._models.are_several:
                self._end(entry, step=version)
            case "refused":
                self._end(entry, error=entry.operation.refused.cause)
            # Among several models the trainer makes a version with the newest values of this one.
            case "publish" if entry.is_made or not self._models.are_several:
                if self._samples.are_awaited:
                    return
                sessions = [s for s in self._fleet.sessions.values() if not s.is_leaving]
                self._publisher.pinned.clear()
                newest = self._progress.version
                if sessions and all(s.is_serving and s.version == newest for s in sessions):
                    self._end(entry, step=version)
            # Nothing is written of version 0, the model of the settings.
            case "save" if self._state.checkpoint.step == version:
                self._end(entry, step=version)
            case "load" if entry.is_made:
                self._end(entry, step=version)
            case "load" if not entry.is_begun:
                cause = self._unloadable(entry.operation.load.name, model)
                if cause or not version:
                    self._end(entry, error=cause)

    def order(self, trainer: trainer_pb2.NextRequest) -> trainer_pb2.Directive | bytes | None:
        """Returns the pass, or the save, whose turn it is; a trainer that asks has none."""
        if self._current is None:
            # Else it would wait until the loop of the operations has looked.
            self._take_turn()
        entry = self._current
        if entry is not None and entry.kind == "compute":
            self._write_ahead()
            # A message that is put into another one is copied.
            (encoded := io.BytesIO()).write(_COMPUTE)
            serialize_length_prefixed(entry.operation.compute, encoded)
            return encoded.getvalue()
        if entry is not None and entry.kind == "save":
            return trainer_pb2.Directive(save=trainer_pb2.SaveOrder())
        return None

    def _write_ahead(self) -> None:
        """Lets the passes of a step that waits be written while the last of them is computed."""
        last = self._current
        # Among several models another one's step may come before.
        if last is not None and last.kind == "compute" and not self._models.are_several:
            model = self._model_of(last)
            step = self._waiting.get((model.stream, last.operation.number + 1))
            if step is not None and step.kind == "step":
                passes = [*model.passes, last] if last.operation.compute.backward else model.passes
                self._former.write_ahead(model.order(step, passes))

    def waits_for(self) -> str:
        if self._current is not None:
            return f"the end of the operation {self._current.operation.id}"
        for stream, _ in self._waiting:
            if model := self._models.by_stream.get(stream):
                return f"operation {model.next} of {stream}, behind which later ones wait"
        return "the next training operation of the client"

    def computed(self, report: trainer_pb2.PassReport) -> None:
        """Ends the pass of the report; a report that is repeated ends none."""
        entry = self._current
        if entry is not None and entry.kind == "compute" and entry.operation.id == report.id:
            step = self._progress.version.step
            self._end(entry, compute=report, error=report.error, step=step)

    def saved(self, step: int) -> None:
        """Ends the save whose turn it is."""
        entry = self._current
        if entry is not None and entry.kind == "save" and step == self._progress.version.step:
            self._end(entry, step=step)

    def next_step(self) -> StepOrder | None:
        """Returns the step whose turn it is, once; the journal has it from then on."""
        entry = self._current
        if entry is None or entry.is_begun or entry.is_made:
            return None
        version, several = self._progress.version, self._models.are_several
        # Servers that start again get the newest version; clients may still sample by the publish
        # of this one, which the step would replace.
        published = [
            one.step == version.step and not one.in_flight
            for one in self._models.named.values()
            if one.entry and one.entry.kind == "publish"
        ]
        served = (session.version for session in self._fleet.serving())
        if not several and any(published) and version not in served:
            return None
        operation, model = entry.operation, self._model_of(entry)
        order = StepOrder(trainer_pb2.GivenStep(id=operation.id, adapter=model.adapter))
        given = order.message
        match entry.kind:
            case "step":
                order = model.order(entry, model.passes)
            case "begin" if several:
                given.begin.CopyFrom(operation.begin.values)
            case "publish" if several:
                given.serve.SetInParent()
            case "load" if version.step:
                if self._unloadable(operation.load.name, model):
                    return None
                named = self._models.named[operation.load.name]
                given.load.step = named.step
                given.load.without_optimizer = operation.load.without_optimizer
                if named.model is not None:
                    given.load.adapter = named.model.adapter.name
            case _:
                return None
        entry.is_begun = True
        # After a kill the journal tells the result of its newest step alone.
        return replace(order, after=self._before.ended if self._before else None)

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, given_s: float | None
    ) -> None:
        """Ends the step of the report, unless servers are still to get it."""
        entry, given = self._current, trained.batch.given
        if entry is None or given is None or entry.operation.id != given.id:
            return
        entry.is_made = True
        if entry.kind != "publish":
            self._end(entry, step=trained.version.step, metrics=report.metrics)
        self._run.signal.notify()

    def set_aside(self, found: SetAside) -> None:
        """Ends the step that could not be made; its passes are gone."""
        entry, given = self._current, found.batch.given
        if entry is not None and given is not None and entry.operation.id == given.id:
            self._end(entry, error=found.cause)


def part(kernel: Kernel) -> Operations:
    """Returns the part of the controller that carries out a client's operations."""
    return Operations(
        kernel.run,
        kernel.books,
        kernel.intake,
        kernel.publisher,
        kernel.scheduler,
        kernel.former,
    )
