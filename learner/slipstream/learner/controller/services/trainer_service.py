"""The controller's service for the trainer: hands orders and batches out, and takes its reports.

Consumes: orders of `loop`, the trainer's reports. Produces: orders and batches on the wire,
versions of the run. Waits for: an order, the disk, the end. Unblocked by: the run's signal, or the
limit of the call.

A run has one trainer at a time, which holds its place by the stream of `KeepPlace`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import NoReturn

import grpc
from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.loop import BatchFormer, TrainerOrders
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.history import REMEDY
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import CallContext
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch, chunks
from slipstream.protocol.checkpoints import complete_steps
from slipstream.protocol.codec import TRAINER_EPOCH, version_from_pb, version_to_pb
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import trainer_pb2_grpc

# Seconds within which a registered trainer must open the stream that keeps its place.
RESERVED_S = 10.0
# Largest number of lines of a trainer's layout that become events.
MAX_LAYOUT_LINES = 256
# Longest wait of a `Next` call; then the trainer calls again.
NEXT_LIMIT_S = 5.0
# Longest time between two looks at a trainer that saves and exports.
LOOK_S = 5.0


class TrainerPlace:
    """The place for the one trainer of a run.

    free -- take() --> reserved -- keep() --> kept -- the last stream ends --> free
                       reserved -- RESERVED_S --> free

    A trainer whose stream has ended may return with its epoch until another trainer takes the
    place.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._progress = run.progress
        # Secret number of the trainer that registered last. 0 before any has registered.
        self.epoch = 0
        self._holder = ""
        self._streams = 0
        self._reserved_until_s = 0.0
        self._turned_away = ""
        self._closed = asyncio.Event()

    @property
    def is_taken(self) -> bool:
        """Whether the trainer that registered last is connected or may still open its stream."""
        return self._streams > 0 or self._run.clock.now_s() < self._reserved_until_s

    async def check_free(self, hello: pb.TrainerHello, context: CallContext) -> None:
        """Rejects a second trainer while the place is taken; adds one event per such trainer."""
        if not self.is_taken:
            return
        newcomer = _describe(hello, context)
        heard_s = self._progress.trainer_heard_s
        text = (
            f"the trainer of {self._holder} has the place in this run and was heard "
            f"{self._run.clock.now_s() - heard_s:.1f} s ago; end it, or wait until it is gone"
        )
        if newcomer != self._turned_away:
            self._turned_away = newcomer
            self._run.events.warn(f"a second trainer, of {newcomer}, waits: {text}")
        await abort(context, grpc.StatusCode.FAILED_PRECONDITION, text, Reason.PLACE_TAKEN)

    def take(self, hello: pb.TrainerHello, context: CallContext) -> int:
        """Gives the place to a trainer; returns the epoch that its later calls must send."""
        self.epoch = secrets.randbits(31) + 1
        self._holder = _describe(hello, context)
        self._reserved_until_s = self._run.clock.now_s() + RESERVED_S
        self._progress.trainer_heard()
        return self.epoch

    async def keep(self, context: CallContext) -> AsyncGenerator[pb.PlaceKept, None]:
        """Keeps the place taken as long as the stream is open; rejects any other trainer."""
        await self.check(context)
        self._streams += 1
        self._reserved_until_s = 0.0
        try:
            yield pb.PlaceKept()
            await self._closed.wait()
        finally:
            self._streams -= 1

    async def check(self, context: CallContext) -> None:
        """Rejects a call unless it comes from the trainer that registered last."""
        cause = ""
        reason = Reason.WRONG_STATE
        if not self.epoch:
            cause = "no trainer has registered since the controller was started"
            reason = Reason.NOT_REGISTERED
        elif epoch_of(context) != str(self.epoch):
            cause = "another trainer has taken over"
        if cause:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, cause, reason)
        self._progress.trainer_heard()

    def close(self) -> None:
        """Ends the streams of `keep`."""
        self._closed.set()


def epoch_of(context: CallContext) -> str:
    """Returns the epoch in the metadata of a call, or "" if there is none."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    return str(metadata.get(TRAINER_EPOCH, ""))


def _describe(hello: pb.TrainerHello, context: CallContext) -> str:
    return hello.process or context.peer()


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Serves one trainer; its rank 0 makes the calls for all ranks."""

    def __init__(
        self,
        run: ControlledRun,
        book: LeaseBook,
        former: BatchFormer,
        publisher: Publisher,
        parts: Sequence[Part],
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._former = former
        self._publisher = publisher
        self._parts = parts
        self.orders = TrainerOrders(run, book, former, publisher, parts)
        self.place = TrainerPlace(run)
        self._lock = asyncio.Lock()
        # When the trainer got its batch, by the monotonic clock.
        self._given_s: float | None = None

    @property
    def goodbye(self) -> pb.TrainerGoodbye | None:
        """The last message of a trainer that has left on purpose."""
        return self.orders.goodbye

    async def Register(self, request: pb.TrainerHello, context: CallContext) -> pb.TrainerWelcome:  # noqa: N802
        """Registers a trainer if the place is free; the trainer repeats the steps it has lost."""
        if claim := _impossible(request):
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, claim, Reason.PROTOCOL)
        version = version_from_pb(request.version)
        problem = ""
        if self._progress.is_over and not self.orders.is_stopping:
            problem = "the run is over"
        elif version.step > self._progress.version.step:
            problem = f"the run is at version {self._progress.version}"
        if problem:
            await _refuse(context, problem, version)
        # Batches may go while a trainer waits: only when it gets the place it needs them.
        await self.place.check_free(request, context)
        if (missing := self._former.first_missing(version.step)) is not None:
            folder = self._run.config.run_dir / CHECKPOINTS
            checkpoint = max(await asyncio.to_thread(complete_steps, folder), default=0)
            if checkpoint > version.step:
                problem = (
                    f"{missing} was removed, and there is a checkpoint of version {checkpoint}"
                )
                await _refuse(context, problem, version, Reason.OUTDATED)
            await _refuse(context, f"{missing} is missing; {REMEDY}", version)
        epoch = self.place.take(request, context)
        for part in self._parts:
            await part.trainer_ended()
        self._publisher.trainer_joined(max(1, request.num_senders))
        self._former.trainer_joined()
        digest = request.weight_digest.hex()
        self.orders.trainer_version = run_version = self._former.identify(version, digest)
        behind = self._progress.version.step - version.step
        if behind == 0:
            self._progress.reached(self.orders.trainer_version)
        else:
            self._run.events.add(
                f"the trainer resumes from version {version.step}; {behind} steps are trained again"
            )
        self._progress.trainer_registered(request.places)
        sizes, *groups = request.layout_description.splitlines()
        self._run.events.add(f"the trainer has {request.num_parameters:,} parameters {sizes}")
        for line in groups[:MAX_LAYOUT_LINES]:
            self._run.events.add(f"  {line}")
        self._progress.moved()
        await self._former.adopt(version, digest)
        return pb.TrainerWelcome(
            run_id=self._progress.run_id, version=version_to_pb(run_version), trainer_epoch=epoch
        )

    async def KeepPlace(  # noqa: N802
        self, request: pb.PlaceRequest, context: CallContext
    ) -> AsyncIterator[pb.PlaceKept]:
        """Keeps the trainer's place until this stream ends."""
        try:
            async with aclosing(self.place.keep(context)) as messages:
                async for message in messages:
                    yield message
        finally:
            for part in self._parts:
                part.trainer_away()

    async def Next(  # noqa: N802
        self, request: pb.NextRequest, context: CallContext
    ) -> AsyncIterator[pb.Directive | bytes]:
        # Sends the metadata early, so that an order for which servers wait is not delayed by it.
        await context.send_initial_metadata(())
        # Half of the call's own deadline, because a late answer would end the run.
        limit_s = min(NEXT_LIMIT_S, (context.time_remaining() or NEXT_LIMIT_S) / 2)
        # An earlier call whose connection the trainer lost may still wait at the same time.
        async with self._lock:
            order = await self.orders.next(request, limit_s, partial(self.place.check, context))
        if not isinstance(order, FormedBatch):
            yield order
            return
        self._given_s = time.monotonic()
        for part in self._parts:
            await part.before_batch()
        yield pb.Directive(batch=order.header)
        parts = chunks(order, request.held_passes)
        while (chunk := await asyncio.to_thread(next, parts, None)) is not None:
            yield pb.Directive(chunk=chunk)

    async def ReportStep(self, request: pb.StepReport, context: CallContext) -> pb.StepReceipt:  # noqa: N802
        """Handles the report of a new version; a repeated report gets the same answer again."""
        await self.place.check(context)
        await self._former.take_up(request, self.orders.trainer_version)
        try:
            answered = self._former.answered(request)
        except ProtocolError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            await abort(context, code, str(error), Reason.WRONG_STATE)
        if answered is not None:
            await self._former.durable()
            return pb.StepReceipt(version=version_to_pb(answered))
        trained = self._former.trained(request)
        self.orders.trainer_version = trained.version
        if not self._progress.is_over:
            # The trainer will ask for its next batch after this answer.
            self._progress.waits_for("the trainer to ask for its next batch")
        if trained.version.step >= self._progress.version.step:
            self._progress.reached(trained.version)
        if trained.version.incarnation > request.version.incarnation:
            self._run.events.warn(
                f"step {trained.version.step} came out different when it was trained again: its "
                f"weights are version {trained.version} now, and are sent again"
            )
        given_s = self._given_s
        self._given_s = None
        for part in self._parts:
            part.stepped(trained, request, given_s)
        await self._former.durable()
        self._progress.moved()
        return pb.StepReceipt(version=version_to_pb(trained.version))

    async def ReportPass(self, request: pb.PassReport, context: CallContext) -> pb.PassReceipt:  # noqa: N802
        await self.place.check(context)
        for part in self._parts:
            part.computed(request)
        self._progress.moved()
        return pb.PassReceipt()

    async def StartPublish(  # noqa: N802
        self, request: pb.PublishStart, context: CallContext
    ) -> pb.PublishStarted:
        await self.place.check(context)
        return pb.PublishStarted(receivers=self._publisher.start(request))

    async def FinishPublish(  # noqa: N802
        self, request: pb.PublishResult, context: CallContext
    ) -> pb.PublishReceipt:
        await self.place.check(context)
        return await self._publisher.finish(request)

    async def ReportCheckpoint(  # noqa: N802
        self, request: pb.CheckpointReport, context: CallContext
    ) -> pb.CheckpointReceipt:
        await self.place.check(context)
        await self._former.saved(request, self._run)
        for part in self._parts:
            part.saved(request.version.step)
        self._run.events.add(
            f"checkpoint of version {request.version.step}: {request.num_bytes / 1e6:,.1f} MB, "
            f"{request.wall_s:.1f} s"
        )
        return pb.CheckpointReceipt()

    async def ReportStored(  # noqa: N802
        self, request: pb.StoredReport, context: CallContext
    ) -> pb.StoredReceipt:
        await self.place.check(context)
        receipts = (part.stored(request) for part in self._parts)
        return next((receipt for receipt in receipts if receipt is not None), pb.StoredReceipt())

    async def ReportWork(self, request: pb.WorkReport, context: CallContext) -> pb.WorkReceipt:  # noqa: N802
        # A trainer that loads its model has not registered and has no epoch yet.
        if epoch_of(context) or self.place.is_taken:
            await self.place.check(context)
        self._progress.trainer_works()
        if not epoch_of(context) and not self._progress.is_over:
            loaded = f"{request.loaded_bytes / 1e9:,.1f} GB so far"
            self._progress.waits_for(f"the trainer to load its model, {loaded}")
        return pb.WorkReceipt()

    async def ReportFailure(  # noqa: N802
        self, request: pb.TrainerFailure, context: CallContext
    ) -> pb.TrainerFailureReceipt:
        if request.HasField("data"):
            await self.place.check(context)
            is_set_aside = await self._set_aside(request, context)
            return pb.TrainerFailureReceipt(set_aside=is_set_aside)
        # Rank 0 has an epoch once it has registered, and the other ranks never have one.
        epoch = epoch_of(context)
        has_place = epoch != "" and epoch == str(self.place.epoch)
        if epoch and not has_place:
            return pb.TrainerFailureReceipt()
        if has_place:
            for part in self._parts:
                await part.trainer_ended()
        if has_place or request.rank > 0 or not self.place.is_taken:
            self._suspect()
        cause = f"trainer rank {request.rank}: {request.message}"
        if request.final and has_place:
            self._progress.fail(cause)
            return pb.TrainerFailureReceipt()
        # The launcher of the ranks starts them again, or fails the run.
        self._run.events.warn(cause)
        if request.final and self.place.epoch == 0:
            # The trainer of the newest version may live, and register again in a moment.
            self._progress.fail_unless_heard(cause)
        return pb.TrainerFailureReceipt()

    async def _set_aside(self, request: pb.TrainerFailure, context: CallContext) -> bool:
        """Sets the trainer's batch aside; returns whether the trainer may take another batch."""
        await self._former.take_up(request.data, self.orders.trainer_version)
        most_in_a_row = self._run.config.controller.max_set_aside_batches
        try:
            set_aside = self._former.set_aside(
                request.data, request.message, most_in_a_row=most_in_a_row
            )
        except ProtocolError as error:
            await abort(
                context, grpc.StatusCode.FAILED_PRECONDITION, str(error), Reason.WRONG_STATE
            )
        except RunFailed as failure:
            self._suspect()
            self._progress.fail(str(failure))
            return False
        await self._former.durable()
        if set_aside is not None:
            self._progress.trainer_failed("")
            self._run.events.warn(set_aside.describe())
            for part in self._parts:
                part.set_aside(set_aside)
            self._progress.waits_for("the trainer to ask for its next batch")
        self._progress.moved()
        return True

    def _suspect(self) -> None:
        """Notes the batch of a failed trainer as suspect if it has never been trained."""
        way_past = ""
        batch = self._former.untried
        if batch is not None:
            way_past = (
                f"batch {batch.batch_id} of step {batch.version} is trained first when the run "
                f"goes on, unless `slipstream set-aside {self._run.config.run_dir} {batch.version}`"
                " takes it out"
            )
        self._progress.trainer_failed(way_past)

    async def Finish(  # noqa: N802
        self, request: pb.TrainerGoodbye, context: CallContext
    ) -> pb.TrainerGoodbyeReceipt:
        """Notes that the trainer leaves on purpose, and the path of its exported model.

        The run fails if the trainer leaves before it is ordered to stop: the trainer then got
        SIGTERM, and nobody restarts it.
        """
        await self.place.check(context)
        self.orders.goodbye = request
        if self._progress.all_steps_done and request.export_path and not self._progress.is_over:
            # An earlier controller had ordered the trainer to stop.
            self._progress.complete()
        if not self._progress.is_over:
            self._progress.fail(
                f"the trainer left at version {self._progress.version.step}, told to by SIGTERM "
                "or an earlier controller; run the same command again to resume it"
            )
        if request.export_path:
            kind = "trained" if self._progress.version.step else "untrained"
            self._run.events.add(f"the {kind} model lies in {request.export_path}")
        self._run.signal.notify()
        return pb.TrainerGoodbyeReceipt()


async def _refuse(
    context: CallContext,
    problem: str,
    version: PolicyVersion,
    reason: Reason = Reason.WRONG_STATE,
) -> NoReturn:
    """Ends the registration of a trainer of `version`, which cannot go on for this `problem`."""
    text = f"{problem}; a trainer of version {version} cannot go on"
    await abort(context, grpc.StatusCode.FAILED_PRECONDITION, text, reason)


def _impossible(hello: pb.TrainerHello) -> str:
    if hello.world_size < 1:
        return f"world_size of a trainer must be at least 1, got {hello.world_size}"
    if hello.num_senders > hello.world_size:
        return (
            f"num_senders of a trainer must be at most its world_size, got {hello.num_senders} "
            f"and {hello.world_size}"
        )
    if not hello.layout_description.strip():
        return "layout_description of a trainer must not be empty"
    return ""


async def await_goodbye(run: ControlledRun, trainer: TrainerServicer, *, silence_s: float) -> None:
    """Waits until the trainer has said goodbye or the run has failed.

    The run fails if the trainer makes no call for `silence_s` seconds, or leaves without the model
    that `learner.export_final` asks for.
    """
    progress = run.progress
    progress.waits_for("the trainer to save and export the model")
    begun_s = run.clock.now_s()
    while trainer.goodbye is None and not progress.has_failed:
        silent_s = run.clock.now_s() - max(begun_s, progress.trainer_heard_s)
        if silent_s > silence_s:
            progress.fail(
                f"nothing was heard of the trainer for {silent_s:.0f} s while it was to save and "
                "export the model; run the same command again to resume it"
            )
            return
        await run.signal.changes(min(LOOK_S, silence_s - silent_s + 0.001), gather_s=0.0)
    goodbye = trainer.goodbye
    is_wanted = run.config.learner.export_final
    if goodbye is not None and is_wanted and not goodbye.export_path:
        progress.fail(
            "the trainer left without exporting the model; run the same command again to resume it"
        )
