"""A publish on one engine: the calls to its workers, their order and their time limits.

Consumes: orders and layouts. Produces: one result of all workers. Waits for: the workers' answers.
Unblocked by: the answers, or the sum of the update's own deadlines, after which workers count as
hung.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_from_pb
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.engine_interface import LoadedWeights, answered
from slipstream.v1 import fleet_pb2, weights_pb2

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
