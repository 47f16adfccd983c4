"""A publish on one server: the controller's orders, and the calls to the engine's workers.

`WeightOrders` carries the orders out one after the other. The engine hands the two that move
weights to its `WeightUpdate`, which calls the workers in order and within their limits.

Consumes: the orders prepare, receive, commit, abort, verdict, rest and wake; layouts. Produces: one
report for each order except abort, verdict and wake. Waits for: the next order, the workers.
Unblocked by: the controller, the limit of a verdict, the sum of an update's own deadlines, after
which workers count as hung.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from slipstream.core.errors import WeightSyncError
from slipstream.core.logs import note_step
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import pack_logprobs, unpack_tokens, version_from_pb
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.engine_interface import (
    Engine,
    GenerationFailed,
    LoadedWeights,
    answered,
)
from slipstream.rollout_server.episodes.dispatcher import Dispatcher
from slipstream.v1 import fleet_pb2, weights_pb2

log = logging.getLogger(__name__)
_MAX_ORDERS = 1024
# Seconds in which the controller must give its verdict on a probe.
VERDICT_LIMIT_S = 60.0
# Seconds after which an engine that scores the few short sequences of a probe counts as hung.
PROBE_LIMIT_S = 120.0
# Aborted publish ids that are remembered: the controller runs one publish at a time.
_MAX_ABORTED = 16
# Seconds that an update may exceed its own deadlines before its worker counts as hung.
_LOAD_LIMIT_S = 120.0
_READY_POLL_S = 0.002
_COMPLAINT = "no answer to a weight update"

# Calls a method of all workers' `SlipstreamWeightTransfer` (`VllmEngine._call_all`).
CallAll = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
# Pauses all requests between two tokens (`EnginePause.pause_for_update`); returns the seconds that
# it took. Raises EngineDied. The argument is the time limit of an update that may come first.
Pause = Callable[[float], Awaitable[float]]
# Gives an idle engine its new version (`EnginePause.resume_idle`). Raises EngineDied.
ResumeIdle = Callable[[PolicyVersion, float], Awaitable[None]]


class WeightOrders:
    """Carries out publish orders in turn; `Phase` lists the phases of a publish.

    orders = WeightOrders(engine, dispatcher, report)  # the engine is paused
    running = tasks.create_task(orders.run())
    orders.put(order)  # for each order, in the controller's order
    orders.close(carry_out=True)  # `run` ends, with the engine paused
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        report: Callable[[fleet_pb2.PublishReport], None],
        *,
        rested: Callable[[fleet_pb2.Rested], None] = lambda _: None,
    ) -> None:
        """`engine` must be paused; `report` and `rested` send reports to the controller."""
        self._engine = engine
        self._dispatcher = dispatcher
        self._report = report
        self._rested = rested
        self._orders: asyncio.Queue[fleet_pb2.ControllerMessage | None] = asyncio.Queue(_MAX_ORDERS)
        self._publish = _Publish("", Phase.FAILED)
        # The version that the engine served last.
        self.version: PolicyVersion | None = None
        # Publish ids of aborts that may still wait in the queue.
        self._aborted = deque[str](maxlen=_MAX_ABORTED)
        # The engine's preparation waits for the publish's other members; an abort cancels it.
        self._preparing: asyncio.Task[None] | None = None
        # The time at which the engine was paused for new weights, and its `paused_s` then.
        self._pause_began: tuple[float, float] | None = None
        # Whether the engine rests: neither `wake` nor new weights came since the order to rest.
        self._rests = False

    @property
    def phase(self) -> "Phase":
        return self._publish.phase

    def put(self, order: fleet_pb2.ControllerMessage) -> None:
        """Queues an order, which `run` carries out in turn; never blocks.

        An abort also cancels a running preparation of its publish at once.
        """
        if order.HasField("abort"):
            self._aborted.append(order.abort.publish_id)
            if self._publish.publish_id == order.abort.publish_id:
                self._stop_preparing()
        self._orders.put_nowait(order)

    def close(self, *, carry_out: bool) -> None:
        """Ends `run` after its current order, or with `carry_out` after all queued orders.

        A draining server uses `carry_out`, since the other members of a publish wait for it.
        """
        if not carry_out:
            self._stop_preparing()
            while not self._orders.empty():
                self._orders.get_nowait()
        self._orders.put_nowait(None)

    async def run(self) -> None:
        """Carries out orders until `close`; when it returns, the engine is paused."""
        while True:
            limit_s = VERDICT_LIMIT_S if self.phase is Phase.PROBING else None
            try:
                async with asyncio.timeout(limit_s):
                    order = await self._orders.get()
            except TimeoutError:
                await self._reject(f"no verdict on the probe within {VERDICT_LIMIT_S:g} s")
                continue
            if order is None:
                break
            await self._carry_out(order)
        await self._pause()
        self._dispatcher.settle(passed=False)

    async def _carry_out(self, order: fleet_pb2.ControllerMessage) -> None:
        match order.WhichOneof("message"):
            case "prepare":
                ready = fleet_pb2.PUBLISH_PHASE_READY
                publish_id = order.prepare.publish_id
                self._report(fleet_pb2.PublishReport(publish_id=publish_id, phase=ready))
            case "receive":
                await self._receive(order.receive)
            case "commit":
                await self._commit(order.commit)
            case "abort":
                log.warning(
                    "publish %s was aborted: %s", order.abort.publish_id, order.abort.reason
                )
                if self.phase is Phase.PROBING:
                    await self._reject(order.abort.reason)
                # No publish is under way; a commit that comes later is refused by its id.
                self._publish = _Publish("", Phase.FAILED)
                await self._pause()
            case "probe_verdict":
                await self._take_verdict(order.probe_verdict)
            case "rest":
                self._rests = True
                await self._engine.pauses.rest(give_back=order.rest.give_back)
                self._rested(fleet_pb2.Rested(number=order.rest.number))
            case "wake":
                # A publish may have woken the engine, or its weights may not be used.
                may_sample = self.phase in (Phase.PROBING, Phase.SERVING)
                if self._rests and may_sample and self.version is not None:
                    self._rests = False
                    await self._engine.pauses.resume(self.version)

    async def _receive(self, order: fleet_pb2.ReceiveWeights) -> None:
        publish = self._publish = _Publish(order.order.publish_id)
        begun_s = time.monotonic()
        try:
            if publish.publish_id in self._aborted:
                raise WeightSyncError("the publish was abandoned")
            # The old weights serve until all members have joined.
            call = self._engine.prepare_weights(order.order, order.layout, order.first_rank)
            self._preparing = asyncio.create_task(call)
            try:
                await self._preparing
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                raise WeightSyncError("the publish was abandoned") from None
            prepared_s = time.monotonic()
            self._note_pause()
            loaded = await self._engine.receive_weights(publish.publish_id)
        except WeightSyncError as error:
            await self._discard(publish.publish_id, str(error))
            return
        publish.phase = Phase.LOADED
        publish.digests = list(loaded.bucket_digests)
        publish.stages = loaded.stages
        publish.stages.prepare_s = prepared_s - begun_s
        if self._pause_began is not None:
            # The engine's current step had ended when the copies began.
            publish.stages.steps_s = max(0.0, loaded.began_s - self._pause_began[0])
        self._report(
            fleet_pb2.PublishReport(
                publish_id=publish.publish_id,
                phase=fleet_pb2.PUBLISH_PHASE_LOADED,
                bucket_digests=publish.digests,
            )
        )

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()

    async def _commit(self, order: fleet_pb2.CommitPublish) -> None:
        publish = self._publish
        publish_id = order.publish_id
        if (publish.publish_id, publish.phase) == (publish_id, Phase.FAILED):
            # The commit was on its way before the failure was reported.
            return
        loaded = publish.publish_id if publish.phase is Phase.LOADED else ""
        cause = ""
        if publish_id in self._aborted:
            # The controller abandoned the publish; its abort may be queued behind this order.
            cause = "the publish was abandoned"
        elif loaded != publish_id:
            cause = f"commit of {publish_id!r}, but {loaded!r} is loaded"
        elif list(order.bucket_digests) != publish.digests:
            cause = "the digests of the loaded buckets are not those that were sent"
        if cause:
            await self._discard(publish_id, cause)
            return
        if order.HasField("probe"):
            self._dispatcher.hold()
            publish.phase = Phase.PROBING
        else:
            publish.phase = Phase.SERVING
        begun_s = time.monotonic()
        version = version_from_pb(order.version)
        self._rests = False
        await self._engine.pauses.resume(version)
        now_s = time.monotonic()
        stages = publish.stages
        stages.resume_s = now_s - begun_s
        stages.served_at = now_s
        self.version = version
        note_step(version.step)
        pause_start = self._pause_began
        self._pause_began = None
        paused_s = (
            0.0 if pause_start is None else self._engine.requests.use().paused_s - pause_start[1]
        )
        logprobs = b""
        if order.HasField("probe"):
            try:
                logprobs = await self._score(order.probe)
            except GenerationFailed as error:
                self._fail(publish_id, f"the probe failed: {error}")
                await self._reject(str(error))
                return
        self._report(
            fleet_pb2.PublishReport(
                publish_id=publish_id,
                phase=fleet_pb2.PUBLISH_PHASE_SERVING,
                bucket_digests=publish.digests,
                probe_logprobs=logprobs,
                paused_s=paused_s,
                stages=publish.stages,
            )
        )

    async def _take_verdict(self, verdict: fleet_pb2.ProbeVerdict) -> None:
        publish = self._publish
        if (publish.publish_id, publish.phase) != (verdict.publish_id, Phase.PROBING):
            if verdict.passed:
                # The controller believes that this server serves.
                self._fail(verdict.publish_id, "the verdict on its probe came too late")
        elif verdict.passed:
            publish.phase = Phase.SERVING
            self._dispatcher.settle(passed=True)
        else:
            await self._reject(verdict.message)

    async def _reject(self, reason: str) -> None:
        """Pauses the engine and cancels all episodes, whose tokens may not be trained."""
        log.error("the new weights are rejected: %s", reason)
        self._publish.phase = Phase.FAILED
        await self._pause()
        # In this order: an episode that ended after `settle` would be delivered as good.
        await self._dispatcher.cancel_all()
        self._dispatcher.settle(passed=False)

    def _note_pause(self) -> None:
        # Before the first version there is nothing to pause.
        if self.version is not None and self._pause_began is None:
            self._pause_began = time.monotonic(), self._engine.requests.use().paused_s

    async def _pause(self) -> None:
        self._note_pause()
        await self._engine.pauses.pause()

    async def _discard(self, publish_id: str, message: str) -> None:
        """Pauses the engine, which then accepts requests but runs none; reports the failure."""
        await self._pause()
        self._fail(publish_id, message)

    async def _score(self, probe: weights_pb2.Probe) -> bytes:
        token_ids = unpack_tokens(probe.token_ids)
        cuts = np.cumsum(np.asarray(probe.lengths, dtype=np.int64))[:-1]
        sequences = [part.tolist() for part in np.split(token_ids, cuts) if part.size]
        async with answered(PROBE_LIMIT_S, "no answer to a probe"):
            logprobs = await self._engine.teacher_forced_logprobs(sequences, probe.adapters)
        return pack_logprobs(logprobs)

    def _fail(self, publish_id: str, message: str) -> None:
        log.warning("publish %s failed: %s", publish_id, message)
        if self._publish.publish_id != publish_id:
            self._publish = _Publish(publish_id)
        self._publish.phase = Phase.FAILED
        failed = fleet_pb2.PUBLISH_PHASE_FAILED
        self._report(fleet_pb2.PublishReport(publish_id=publish_id, phase=failed, message=message))


class Phase(Enum):
    """The phases of a publish; the new weights sample only in PROBING and SERVING."""

    # The engine prepares, waits for buckets and loads them.
    RECEIVING = "receiving"
    # The engine has loaded all buckets; it samples nothing before the commit.
    LOADED = "loaded"
    # The engine samples; trajectories wait for the verdict on the probe.
    PROBING = "probing"
    SERVING = "serving"
    # The weights may not be used; the engine is paused.
    FAILED = "failed"


@dataclass
class _Publish:
    """The state of a publish on this server."""

    publish_id: str
    phase: Phase = Phase.RECEIVING
    # The digests of the buckets that the engine loaded.
    digests: list[bytes] = field(default_factory=list)
    stages: fleet_pb2.PublishStages = field(default_factory=fleet_pb2.PublishStages)


class WeightUpdate:
    """Carries out the updates of one engine, one after another.

    updates = WeightUpdate(call_all, pauses.pause_for_update, may_stage=True)
    await updates.prepare(order, layout, first_rank)  # old weights serve; may be abandoned
    loaded = await updates.receive(order.publish_id)  # now the engine is paused: resume it
    """

    def __init__(self, call_all: CallAll, pause: Pause, *, may_stage: bool) -> None:
        """`may_stage`: weights may arrive beside those that serve while requests run."""
        self._call_all = call_all
        self._pause = pause
        self._may_stage = may_stage
        # A worker that stages receives the buckets in `prepare`; a worker that loads receives them
        # in `receive`. In one communicator they would wait for each other, so staging needs a plan
        # in all workers.
        self._all_have_plan = False
        # Whether all workers have room to stage; None if unknown. Workers keep used memory.
        self._has_room: bool | None = None
        self._announced: _Announced | None = None
        # The terms of the last update, if all workers copied it by plan: they still have its
        # membership, memory and views. None if the next `prepare` tells them everything.
        self._ready_for: tuple[str, float] | None = None
        # The layout of the last update, which hardly ever changes, its buckets and bytes.
        self._layout = b""
        self._num_buckets = 0
        self._num_bytes = 0
        self._are_adapters_alone = False
        # The last layout with weights: for any other one the workers have no plan yet.
        self._weights_layout = b""

    async def prepare(
        self,
        order: weights_pb2.PublishOrder,
        layout: weights_pb2.WeightLayout,
        first_rank: int,
        *,
        is_busy: bool = True,
    ) -> None:
        """Prepares membership, memory and views of an update; generation continues meanwhile.

        An empty `layout` means the layout of the previous update. Calls to the workers delay the
        engine's steps, so they are left out for an update like the previous one. A staged update
        always calls the workers: they receive all its buckets here, and copy them in `receive`.
        `is_busy` says that requests run; only then may an update be staged. Raises WeightSyncError
        if the update cannot be prepared, EngineDied if the workers do not answer.
        """
        self._announced = None
        is_given = bool(layout.tensors or layout.adapters)
        described = layout.SerializeToString() if is_given else self._layout
        if not described:
            raise WeightSyncError(f"publish {order.publish_id!r} came without a layout")
        terms = (order.communicator.communicator_id, order.bucket_deadline_s)
        is_known = described == self._layout and not order.new_communicator
        if described != self._layout:
            # A model of many experts has tens of thousands of tensors.
            buckets = await asyncio.to_thread(layout_from_pb, layout)
            self._layout, self._num_buckets, self._has_room = described, len(buckets), None
            self._num_bytes = sum(bucket.num_bytes for bucket in buckets)
            self._are_adapters_alone = not layout.tensors
            if layout.tensors and described != self._weights_layout:
                self._weights_layout = described
                self._all_have_plan = False
        stage = is_busy and await self._chooses_staging()
        limit_s = order.bucket_deadline_s * self._num_buckets + _LOAD_LIMIT_S
        if stage or not is_known or terms != self._ready_for:
            self._ready_for = None
            async with answered(order.join_deadline_s + limit_s, _COMPLAINT):
                # A call waits for the engine's step: one is enough where all workers are ready.
                arguments = (order.SerializeToString(), described, first_rank, stage)
                ready = await self._call("prepare", *arguments)
                while not all(ready):
                    await asyncio.sleep(_READY_POLL_S)
                    ready = await self._call("is_ready")
        version = version_from_pb(order.version)
        ready_for = None if stage else terms
        self._announced = _Announced(order.publish_id, version, limit_s, ready_for, stage)

    async def receive(
        self, publish_id: str, resume_idle: ResumeIdle | None = None
    ) -> LoadedWeights:
        """Receives and loads the prepared update; then requests wait until the engine is resumed.

        `resume_idle` is given for an idle engine whose requests are held until `resume`. If all
        workers have a copy plan, it is called in place of a pause and a resume, even if the update
        then fails. Raises WeightSyncError if the update fails, EngineDied if the workers do not
        answer.
        """
        announced = self._announced
        self._announced = None
        if announced is None or announced.publish_id != publish_id:
            raise WeightSyncError(f"publish {publish_id!r} was not prepared")
        # Reset first: a failure leaves the workers in different states.
        by_plan = self._all_have_plan
        self._all_have_plan = False
        self._ready_for = None
        has_room = self._has_room
        self._has_room = None
        if by_plan and resume_idle is not None:
            pause_s = 0.0
            await self._begin(announced)
            # The buckets are on the wire now. The engine takes calls in order: the new version must
            # not wait for the last bucket, so it is given first.
            _, results = await asyncio.gather(
                resume_idle(announced.version, announced.limit_s), self._finish(announced)
            )
        elif by_plan:
            # Both at once: copies wait on the device for the steps before them, and an engine that
            # is told to pause begins no other step. It preempts requests while the device copies.
            pausing = self._pause(announced.limit_s)
            pause_s, _ = await asyncio.gather(pausing, self._begin(announced))
            results = await self._finish(announced)
        else:
            # vLLM's loader takes layers apart: no step may run meanwhile.
            pause_s = await self._pause(0.0)
            results = await self._finish(announced)
        if any(result["digests"] != results[0]["digests"] for result in results):
            raise WeightSyncError("the workers of one engine received different bytes")
        self._all_have_plan = all(result["has_plan"] for result in results)
        all_by_plan = all(result["by_plan"] for result in results)
        if all_by_plan:
            self._ready_for = announced.terms
            self._has_room = has_room
        stages = fleet_pb2.PublishStages(
            pause_s=pause_s,
            receive_s=max(result["receive_s"] for result in results),
            load_s=max(result["load_s"] for result in results),
            copied=all_by_plan,
            # The worker that joined the first broadcast last waited for no other.
            wire_s=min(result["wire_s"] for result in results),
            staged=announced.staged,
        )
        began_s = min(result["began_s"] for result in results)
        return LoadedWeights(tuple(map(bytes.fromhex, results[0]["digests"])), stages, began_s)

    async def _chooses_staging(self) -> bool:
        """Returns whether to stage the update; either all workers stage it or none."""
        if not self._may_stage or not (self._all_have_plan or self._are_adapters_alone):
            return False
        if self._has_room is None:
            async with answered(_LOAD_LIMIT_S, _COMPLAINT):
                rooms = await self._call("room")
            self._has_room = min(rooms) >= self._num_bytes
        return self._has_room

    async def _begin(self, announced: "_Announced") -> None:
        try:
            async with answered(announced.limit_s, _COMPLAINT):
                await self._call("begin")
        except WeightSyncError:
            # The update is over only when the workers that began it have left it.
            with contextlib.suppress(WeightSyncError):
                await self._finish(announced)
            raise

    async def _finish(self, announced: "_Announced") -> list[Any]:
        """Ends the update; returns the workers' results."""
        async with answered(announced.limit_s, _COMPLAINT):
            return await self._call("receive")

    async def _call(self, name: str, *arguments: Any) -> list[Any]:  # noqa: ANN401 - vLLM's call
        """Returns the results of the method of this name in all workers.

        Raises the first WeightSyncError of a worker.
        """
        answers = await self._call_all(name, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise WeightSyncError(errors[0])
        return [answer["value"] for answer in answers]


@dataclass(frozen=True)
class _Announced:
    publish_id: str
    version: PolicyVersion
    limit_s: float
    # The communicator and the bucket deadline: while these stay the same, workers keep what they
    # prepared. None if they keep nothing: staged buckets arrive elsewhere.
    terms: tuple[str, float] | None
    staged: bool
