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
import io
from dataclasses import replace
from typing import Any

import grpc.aio
from google.protobuf.proto import serialize_length_prefixed
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.extensions.tinker.models import Entry, Model, Models, Named
from slipstream.extensions.tinker.operation_results import OperationResults
from slipstream.extensions.tinker.operation_store import OperationStore
from slipstream.extensions.tinker.samples import Samples
from slipstream.extensions.tinker.service import OperationServicer
from slipstream.extensions.tinker.turns import Turns
from slipstream.learner.controller.kernel import Kernel
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part, Tasks
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.recorded_steps import RecordedBatch
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.trajectories.formed_batch import (
    FormedBatch,
    SetAside,
    StepOrder,
    Trained,
)
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.checkpoints import complete_steps, write_kept
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc, trainer_pb2

# An operation at which so many trainers have ended is refused: the next one would end, too.
MAX_TRAINER_ENDS = 2
LOOK_S = 0.5
# The beginning of an encoded directive whose pass follows.
_COMPUTE = bytes([trainer_pb2.Directive.COMPUTE_FIELD_NUMBER << 3 | 2])


class Operations(Part):
    """Carries out one training operation at a time, and samples of any number at once.

    A pass, save or step whose turn it is becomes an order of the trainer, a publish unpins the
    servers. All servers are pinned otherwise, so that they serve what was published last.
    """

    def __init__(
        self,
        run: ControlledRun,
        books: Books,
        intake: Intake,
        publisher: Publisher,
        scheduler: Scheduler,
        former: BatchFormer,
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._fleet = books.fleet
        self._journal = books.journal
        self._state = books.state
        self._publisher = publisher
        self._former = former
        self._store = OperationStore(run.config.run_dir / "operations")
        self._checkpoints = run.config.run_dir / CHECKPOINTS
        self._models = Models(run.config.lora)
        self._entries: dict[str, Entry] = {}
        self._samples = Samples(
            run, books, intake, scheduler, self._models, self._entries, end=self._end
        )
        self._turns = Turns(self._models, unloadable=self._unloadable, fail=self._fail)
        self._results = OperationResults(
            run, self._state, self._store, self._checkpoints, self._entries, self._models
        )
        self.service = OperationServicer(
            self._store,
            self._checkpoints,
            self._entries,
            self._models,
            self._samples,
            self._turns,
            queue=self._add,
        )
        # The operation whose turn it is, and whether a trainer has its order from this start.
        self._current: Entry | None = None
        self._is_ordered = False
        # The batch of a step at which a trainer ended that the step's operation counts already.
        self._counted_batch: FormedBatch | None = None
        # The operation that ended last; its result may not be on the disk yet.
        self._before: Entry | None = None

    def serve(self, server: grpc.aio.Server) -> None:
        """Adds the service that the HTTP process calls."""
        operations_pb2_grpc.add_OperationServiceServicer_to_server(self.service, server)

    def tasks(self) -> Tasks:
        """Returns the tasks that give turns and write results."""
        return {"operations": self._give_turns(), "results": self._results.write()}

    async def close_files(self) -> None:
        """Refuses further operations, which the clients send again to the run when it goes on."""
        await asyncio.to_thread(self._store.close)

    def restore(self, history: RunHistory) -> None:
        """Takes over operations and results on the disk, and results that a kill has lost."""
        order = self._order_of(history.batches.get(history.next_step - 1))
        is_made = history.version.step == history.next_step
        set_aside = {
            self._order_of(batch).id: batch.batch_id
            for batch in history.set_aside
            if batch.step == history.next_step
        }
        entries = []
        for place, operation, result, _ in self._store.read():
            entry = Entry(operation, place, result)
            self._entries[operation.id] = entry
            entries.append(entry)
            self.service.num_stored = place + 1
            # The trainer has, or gets, the batch of this step; the step may be journaled.
            entry.is_begun = operation.id == order.id
            if result.is_done:
                entry.ended.set()
            elif operation.id in set_aside:
                self._end(entry, error=f"batch {set_aside[operation.id]} was set aside")
            elif entry.is_begun and is_made:
                entry.is_made = True
                if entry.kind != "publish":
                    self._end(
                        entry,
                        adapter=None if operation.number else order.adapter,
                        step=history.version.step,
                        metrics=history.metrics,
                    )
        self._restore_models([entry for entry in entries if entry.result.is_done])
        for entry in entries:
            if entry.ended.is_set():
                # A client that was not told of it asks soon.
                entry.step = entry.result.step
                entry.is_told = True
                entry.result = pb.OperationResult()
            elif entry.is_begun and not entry.result.is_done:
                self._turns.resumed = entry
                if entry.operation.number == 0:
                    self._models.take(entry.operation.stream, order.adapter)
            elif not entry.result.is_done:
                self._queue(entry)

    def _restore_models(self, ended: list[Entry]) -> None:
        """Makes models in the order in which they came, and notes their operations by number."""
        models: dict[str, Model] = {}
        for entry in sorted(ended, key=lambda entry: entry.operation.number):
            stream = entry.operation.stream
            if entry.kind == "finish":
                self._models.finished[stream] = entry
                continue
            if entry.operation.number == 0 and not entry.result.error:
                models[stream] = self._models.take(stream, entry.result.adapter)
            if model := models.get(stream):
                self._note_end(model, entry)

    def _order_of(self, batch: RecordedBatch | None) -> trainer_pb2.GivenStep:
        """Returns the order that a batch carries out, an empty one without its file."""
        if batch is None or (batch.step, batch.attempt) not in self._journal.kept_batches():
            return trainer_pb2.GivenStep()
        return self._journal.read_batch(batch).header.given

    def _add(self, entry: Entry) -> None:
        """Takes an operation of a client, which is on the disk."""
        self._queue(entry)
        self._write_ahead()
        self._run.signal.notify()

    def _queue(self, entry: Entry) -> None:
        """Lets an operation wait for its turn; the end of a session is carried out at once."""
        if entry.kind == "finish":
            self._models.finished[entry.operation.stream] = entry
            # The SDK does not ask for this result.
            entry.is_told = True
            self._end(entry)
        else:
            self._turns.add(entry)

    def _take_turn(self) -> None:
        """Begins the operation whose turn it is, if there is one."""
        entry = self._turns.take()
        if entry is None:
            return
        self._current = entry
        self._is_ordered = False
        model = self._model_of(entry)
        self._models.turn(model)
        if entry.kind == "compute":
            entry.operation.compute.adapter.CopyFrom(model.adapter)
        elif entry.kind == "publish":
            self._samples.await_before(model)
        elif self._models.newest(entry.operation.load.name, model.stream) is model:
            entry.is_made = True
        # Trainer or loop may have woken before, and seen no operation.
        self._run.signal.notify()

    def _model_of(self, entry: Entry) -> Model:
        return self._models.by_stream[entry.operation.stream]

    def _unloadable(self, name: str, stream: str) -> str:
        """Returns why the model of a stream, or its new one, cannot load `name`, or ""."""
        model = self._models.by_stream.get(stream)
        newest = self._models.newest(name, stream)
        if newest is not None and model in (newest, None):
            return ""
        target = self._models.named.get(name)
        if target is None:
            return f"{name} is no state that this run saved"
        if target.entry is not None and target.entry.kind == "publish":
            return f"{name} has weights for samples alone: load a state, which save_state saves"
        if not self._is_saved(target):
            return f"the checkpoint of {name} is gone: its ttl was over, or somebody removed it"
        if model is not None and target.model is not None:
            saved = target.model.adapter
            if (saved.rank, saved.alpha) != (model.adapter.rank, model.adapter.alpha):
                return (
                    f"{name} has rank {saved.rank} and alpha {saved.alpha:g}, this model has "
                    f"{model.adapter.rank} and {model.adapter.alpha:g}: create a training client "
                    "from the state"
                )
        return ""

    def _is_saved(self, target: Named) -> bool:
        """Whether what a name stands for can be loaded: version 0 is the run's own start."""
        return not target.step or target.step in complete_steps(self._checkpoints)

    def _fail(self, entry: Entry, cause: str) -> None:
        self._end(entry, error=cause)

    def _end(self, entry: Entry, **result: Any) -> None:  # noqa: ANN401 - fields of a message
        """Ends an operation with this result, which is told once it is on the disk."""
        entry.result = pb.OperationResult(is_done=True, **result)
        if entry.kind in ("publish", "save", "load"):
            entry.result.name = getattr(entry.operation, entry.kind).name
        self._results.queue.put_nowait(entry)
        if entry is self._current:
            self._end_turn(entry)
        self._run.signal.notify(gathered=entry.place is None)

    def _end_turn(self, entry: Entry) -> None:
        self._current = None
        model = self._model_of(entry)
        held_passes = model.passes
        is_first = entry.operation.number == 0
        if is_first:
            entry.result.adapter.CopyFrom(model.adapter)
        self._note_end(model, entry)
        if is_first and entry.result.error:
            del self._models.by_stream[model.stream]
            self._turns.end_lost()
        model.touch()
        for done in held_passes if entry.kind in ("step", "load") else [entry]:
            if done.kind == "compute" and done not in model.passes:
                # A step's batch holds the sequences of its passes.
                done.operation.compute.ClearField("sequences")
                self._results.queue.put_nowait(done)

    def _note_end(self, model: Model, entry: Entry) -> None:
        """Moves on behind the operation whose turn it was, which is done."""
        operation = entry.operation
        result = entry.result
        is_new = not entry.ended.is_set()
        model.next = operation.number + 1
        model.last = entry
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
        model.steps = max(model.steps, result.steps)
        result.steps = model.steps
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

    async def _give_turns(self) -> None:
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
        """Ends an operation whose turn it is if nothing is to be done, or nothing can be."""
        version = self._progress.version.step
        model = self._model_of(entry)
        if cause := self._refusal(entry, model):
            self._end(entry, error=cause)
            return
        match entry.kind:
            case "begin" if not self._models.are_several and not version:
                self._end(entry, step=version)
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
            case "load" if entry.is_made or not version:
                self._end(entry, step=version)

    def _refusal(self, entry: Entry, model: Model) -> str:
        """Returns why an operation whose turn it is cannot be carried out, or "" if it can be."""
        operation = entry.operation
        if entry.is_begun or entry.is_made:
            return ""
        if operation.trainer_ends >= MAX_TRAINER_ENDS:
            return _refused_after(operation)
        if entry.kind == "refused":
            return operation.refused.cause
        if entry.kind == "load":
            return self._unloadable(operation.load.name, model.stream)
        target = self._models.named.get(operation.save.name) if entry.kind == "save" else None
        if target is not None and not operation.save.may_replace and self._is_saved(target):
            return (
                f"{operation.save.name} is in use: give the state another name, delete the old one "
                "or save with overwrite=True"
            )
        return ""

    def order(self, trainer: trainer_pb2.NextRequest) -> trainer_pb2.Directive | bytes | None:
        """Returns the pass, or the save, whose turn it is; a trainer that asks has none."""
        if self._current is None:
            # The trainer would wait until the loop of the operations has looked.
            self._take_turn()
        entry = self._current
        if entry is None or entry.kind not in ("compute", "save"):
            return None
        if self._refusal(entry, self._model_of(entry)):
            # The loop of the operations ends it.
            return None
        self._is_ordered = True
        if entry.kind == "save":
            return trainer_pb2.Directive(save=trainer_pb2.SaveOrder())
        self._write_ahead()
        # A message that is put into another one is copied.
        encoded = io.BytesIO()
        encoded.write(_COMPUTE)
        serialize_length_prefixed(entry.operation.compute, encoded)
        return encoded.getvalue()

    async def trainer_ended(self) -> None:
        """Counts the end of a trainer against the operation that it had; the second one ends it.

        The count is on the disk, so that a run that starts anew does not repeat it for ever.
        """
        entry = self._current
        batch = self._former.untried
        if entry is None or entry.place is None:
            return
        operation = entry.operation
        step = None if batch is None else batch.given
        is_counted = batch is self._counted_batch
        has_step = step is not None and step.id == operation.id and not is_counted
        if not has_step and not self._is_ordered:
            return
        self._is_ordered = False
        self._counted_batch = batch
        operation.trainer_ends += 1
        await asyncio.to_thread(self._store.write, entry.place, operation)
        if operation.trainer_ends < MAX_TRAINER_ENDS or entry is not self._current:
            return
        cause = _refused_after(operation)
        self._run.events.warn(cause)
        if batch is None or not has_step:
            self._end(entry, error=cause)
            return
        fault = trainer_pb2.DataFault(step=batch.step, batch_id=batch.batch_id)
        if aside := self._former.set_aside(fault, cause, most_in_a_row=0):
            await self._former.durable()
            self.set_aside(aside)

    def _write_ahead(self) -> None:
        """Lets the passes of a step that waits be written while the last of them is computed."""
        last = self._current
        # Among several models another one's step may come before.
        if last is None or last.kind != "compute" or self._models.are_several:
            return
        model = self._model_of(last)
        step = self._turns.behind(model, last.operation.number)
        if step is not None and step.kind == "step":
            passes = list(model.passes)
            if last.operation.compute.backward:
                passes.append(last)
            self._former.write_ahead(model.order(step, passes))

    def waits_for(self) -> str:
        if self._current is not None:
            return f"the end of the operation {self._current.operation.id}"
        return self._turns.missing() or "the next training operation of the client"

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
        version = self._progress.version
        several = self._models.are_several
        # Servers that start again get the newest version; clients may still sample by the publish
        # of this one, which the step would replace.
        published = [
            target.step == version.step and not target.in_flight
            for target in self._models.named.values()
            if target.entry and target.entry.kind == "publish"
        ]
        served = [session.version for session in self._fleet.serving()]
        if not several and any(published) and version not in served:
            return None
        model = self._model_of(entry)
        if self._refusal(entry, model):
            return None
        operation = entry.operation
        order = StepOrder(trainer_pb2.GivenStep(id=operation.id, adapter=model.adapter))
        match entry.kind:
            case "step":
                order = model.order(entry, model.passes)
            case "begin" if several:
                order.message.begin.CopyFrom(operation.begin.values)
            case "begin" if version.step:
                order.message.begin.SetInParent()
            case "publish" if several:
                order.message.serve.SetInParent()
            case "load" if version.step:
                self._fill_load(order.message, operation.load)
            case _:
                return None
        entry.is_begun = True
        # After a kill the journal tells the result of its newest step alone.
        return replace(order, after=self._before.ended if self._before else None)

    def _fill_load(self, order: trainer_pb2.GivenStep, load: pb.Load) -> None:
        """Orders what a name stands for; of version 0 nothing was written, so the run's start."""
        target = self._models.named[load.name]
        if not target.step:
            order.begin.SetInParent()
            return
        order.load.step = target.step
        order.load.without_optimizer = load.without_optimizer
        if target.model is not None:
            order.load.adapter = target.model.adapter.name

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, given_s: float | None
    ) -> None:
        """Ends the step of the report, unless servers are still to get it."""
        entry = self._current
        order = trained.batch.given
        if entry is None or order is None or entry.operation.id != order.id:
            return
        entry.is_made = True
        if entry.kind != "publish":
            self._end(entry, step=trained.version.step, metrics=report.metrics)
        self._run.signal.notify()

    def set_aside(self, set_aside: SetAside) -> None:
        """Ends the step that could not be made; its passes are gone."""
        entry = self._current
        order = set_aside.batch.given
        if entry is not None and order is not None and entry.operation.id == order.id:
            self._end(entry, error=set_aside.cause)


def _refused_after(operation: pb.Operation) -> str:
    return (
        f"{operation.id} is refused: {operation.trainer_ends} trainers have ended while they "
        "carried it out; their logs have the cause"
    )


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
