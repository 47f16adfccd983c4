"""New weights, step by step, as the controller orders it; the state of this server follows from it.

Consumes: prepare, receive, commit, abort, verdict. Produces: one report for each but abort and
verdict. Waits for: the next order, the engine. Unblocked by: the controller, the engine's
deadlines, the limit of a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

import numpy as np
from slipstream.protocol.codec import pack_logprobs, unpack_tokens, version_from_pb
from slipstream.protocol.errors import WeightSyncError
from slipstream.protocol.types import PolicyVersion
from slipstream.rollout_server.episodes.dispatcher import Dispatcher
from slipstream.rollout_server.inference.generation import Engine, EngineDied, GenerationFailed
from slipstream.v1 import fleet_pb2, weights_pb2

log = logging.getLogger(__name__)

_MAX_ORDERS = 1024
_VERDICT_LIMIT_S = 60.0
# A few short sequences: an engine that takes longer hangs.
_PROBE_LIMIT_S = 120.0
# Aborts whose publish may still wait in the queue: there is one at a time.
_MAX_ABORTED = 16


class ServingState(Enum):
    """What this server may do with the weights that it has."""

    JOINING = "joining"
    LOADING = "loading"
    SERVING = "serving"
    STALE = "stale"


class Publisher:
    """Takes publish orders in turn."""

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        report: Callable[[fleet_pb2.PublishReport], None],
    ) -> None:
        """The engine is paused."""
        self._engine = engine
        self._dispatcher = dispatcher
        self._report = report
        self._orders: asyncio.Queue[fleet_pb2.ControllerMessage | None] = asyncio.Queue(_MAX_ORDERS)
        self.state = ServingState.JOINING
        self.version: PolicyVersion | None = None
        self._loaded_publish = ""
        self._failed_publish = ""
        # Who prepares a publish waits for its other members: it is told when that is in vain.
        self._aborted, self._preparing = deque[str](maxlen=_MAX_ABORTED), ""
        # Of what is prepared now.
        self._giving_up: asyncio.Future[None] | None = None
        # The commit that came last; it may be in the queue.
        self._committed = ""
        # Of the buckets that were loaded last.
        self._digests: list[bytes] = []
        self._stages = fleet_pb2.PublishStages()
        # The publish whose probe waits for its verdict.
        self._unproved_publish = ""
        self._paused_s = 0.0
        self._paused_at_s: float | None = None

    @property
    def paused_s(self) -> float:
        """Seconds during which generation stood still for new weights."""
        running = 0.0 if self._paused_at_s is None else time.monotonic() - self._paused_at_s
        return self._paused_s + running

    def put(self, order: fleet_pb2.ControllerMessage) -> None:
        """Takes an order; it is carried out after those before it."""
        kind = order.WhichOneof("message")
        if kind == "abort":
            self._aborted.append(order.abort.publish_id)
            if self._preparing == order.abort.publish_id:
                self._give_up_preparing()
        elif kind == "commit" and not order.commit.HasField("probe"):
            self._committed = order.commit.publish_id
        self._orders.put_nowait(order)

    def close(self, *, carry_out: bool) -> None:
        """Ends `run` after what is being done now; with `carry_out` after all orders that came.

        Others wait for a receiver that was told to receive.
        """
        if not carry_out:
            self._give_up_preparing()
        while not (carry_out or self._orders.empty()):
            self._orders.get_nowait()
        self._orders.put_nowait(None)

    async def run(self) -> None:
        """Carries out orders until `close`; afterwards the engine is paused."""
        while True:
            try:
                async with asyncio.timeout(_VERDICT_LIMIT_S if self._unproved_publish else None):
                    order = await self._orders.get()
            except TimeoutError:
                await self._reject(f"no verdict on the probe within {_VERDICT_LIMIT_S:g} s")
                continue
            if order is None:
                break
            await self._carry_out(order)
        await self._stand_still()
        self._dispatcher.settle(passed=False)

    async def _carry_out(self, order: fleet_pb2.ControllerMessage) -> None:
        match order.WhichOneof("message"):
            case "prepare":
                self._answer(order.prepare.publish_id, fleet_pb2.PUBLISH_PHASE_READY)
            case "receive":
                await self._receive(order.receive)
            case "commit":
                await self._commit(order.commit)
            case "abort":
                await self._abort(order.abort)
            case "probe_verdict":
                await self._take_verdict(order.probe_verdict)

    async def _receive(self, order: fleet_pb2.ReceiveWeights) -> None:
        publish_id = order.order.publish_id
        self.state, self._loaded_publish = ServingState.LOADING, ""
        begun_s = time.monotonic()
        try:
            await self._prepare(order)
            prepared_s = time.monotonic()
            self._note_pause()
            loaded = await self._engine.receive_weights(publish_id)
        except WeightSyncError as error:
            await self._give_back(publish_id, str(error))
            return
        self._loaded_publish, self._digests = publish_id, list(loaded.bucket_digests)
        self._stages = fleet_pb2.PublishStages(
            prepare_s=prepared_s - begun_s,
            pause_s=loaded.pause_s,
            receive_s=loaded.receive_s,
            load_s=loaded.load_s,
            copied=loaded.by_plan,
            wire_s=loaded.wire_s,
        )
        if loaded.goes_on and self._committed == publish_id:
            # Its commit is next and waits for nothing: one report says both.
            return
        self._answer(
            publish_id,
            fleet_pb2.PUBLISH_PHASE_LOADED,
            bucket_digests=self._digests,
        )

    async def _prepare(self, order: fleet_pb2.ReceiveWeights) -> None:
        """Old weights serve until all is ready: waiting for other members costs no pause."""
        publish_id = order.order.publish_id
        if publish_id in self._aborted:
            raise WeightSyncError("the publish was given up")
        self._preparing = publish_id
        giving_up = self._giving_up = asyncio.get_running_loop().create_future()
        preparing = asyncio.create_task(
            self._engine.prepare_weights(order.order, order.layout, order.first_rank)
        )
        try:
            await asyncio.wait((preparing, giving_up), return_when=asyncio.FIRST_COMPLETED)
            if not preparing.done():
                raise WeightSyncError("the publish was given up")
            preparing.result()
        finally:
            self._preparing, self._giving_up = "", None
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait((preparing,))

    def _give_up_preparing(self) -> None:
        if self._giving_up is not None and not self._giving_up.done():
            self._giving_up.set_result(None)

    async def _commit(self, order: fleet_pb2.CommitPublish) -> None:
        publish_id = order.publish_id
        if publish_id == self._failed_publish:
            # It was on its way before that was reported.
            return
        if publish_id in self._aborted:
            # Nobody vouches for it any more, though its abort may lie behind this in the queue.
            await self._give_back(publish_id, "the publish was given up")
            return
        if self._loaded_publish != publish_id:
            cause = f"commit of {publish_id!r}, loaded is {self._loaded_publish!r}"
            await self._give_back(publish_id, cause)
            return
        self._loaded_publish = ""
        if list(order.bucket_digests) != self._digests:
            cause = "the digests of the loaded buckets are not those that were sent"
            await self._give_back(publish_id, cause)
            return
        version = version_from_pb(order.version)
        if order.HasField("probe"):
            self._dispatcher.hold()
            self._unproved_publish = publish_id
        paused_s = await self._go_on(version)
        logprobs = b""
        if order.HasField("probe"):
            try:
                logprobs = await self._score(order.probe)
            except GenerationFailed as error:
                self._fail(publish_id, f"the probe failed: {error}")
                await self._reject(str(error))
                return
        self._answer(
            publish_id,
            fleet_pb2.PUBLISH_PHASE_SERVING,
            bucket_digests=self._digests,
            probe_logprobs=logprobs,
            paused_s=paused_s,
            stages=self._stages,
        )

    async def _abort(self, order: fleet_pb2.AbortPublish) -> None:
        log.warning("publish %s was aborted: %s", order.publish_id, order.reason)
        if order.publish_id == self._unproved_publish:
            await self._reject(order.reason)
        self._loaded_publish = ""
        self.state = ServingState.STALE
        await self._stand_still()

    async def _take_verdict(self, verdict: fleet_pb2.ProbeVerdict) -> None:
        if verdict.publish_id != self._unproved_publish:
            if verdict.passed:
                # The controller takes this server for one that serves.
                self._fail(verdict.publish_id, "the verdict on its probe came too late")
            return
        if verdict.passed:
            self._unproved_publish = ""
            self._dispatcher.settle(passed=True)
        else:
            await self._reject(verdict.message)

    async def _reject(self, reason: str) -> None:
        """The weights are not what they should be: nothing that they sampled may be trained."""
        log.error("the new weights are rejected: %s", reason)
        self._unproved_publish = ""
        self.state = ServingState.STALE
        await self._stand_still()
        # First the running ones, then the gate opens: nothing slips through between.
        await self._dispatcher.cancel_all()
        self._dispatcher.settle(passed=False)

    def _note_pause(self) -> None:
        if self._paused_at_s is None and self.version is not None:
            self._paused_at_s = time.monotonic()

    async def _stand_still(self) -> None:
        self._note_pause()
        await self._engine.pause()

    async def _go_on(self, version: PolicyVersion) -> float:
        """Serves `version`; the seconds that generation stood still."""
        begun_s = time.monotonic()
        await self._engine.resume(version)
        now_s = time.monotonic()
        self._stages.resume_s, self._stages.served_at = now_s - begun_s, now_s
        self.state, self.version = ServingState.SERVING, version
        paused_s = 0.0
        if self._paused_at_s is not None:
            paused_s = now_s - self._paused_at_s
            self._paused_s, self._paused_at_s = self._paused_s + paused_s, None
        return paused_s

    async def _give_back(self, publish_id: str, message: str) -> None:
        """What was loaded is nobody's: the engine lets requests in again, but runs none."""
        await self._stand_still()
        self._fail(publish_id, message)

    async def _score(self, probe: weights_pb2.Probe) -> bytes:
        token_ids = unpack_tokens(probe.token_ids)
        cuts = np.cumsum(np.asarray(probe.lengths, dtype=np.int64))[:-1]
        sequences = [part.tolist() for part in np.split(token_ids, cuts) if part.size]
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S):
                return pack_logprobs(await self._engine.teacher_forced_logprobs(sequences))
        except TimeoutError:
            raise EngineDied(f"no answer to a probe within {_PROBE_LIMIT_S:g} s") from None

    def _fail(self, publish_id: str, message: str) -> None:
        log.warning("publish %s failed: %s", publish_id, message)
        self._failed_publish = publish_id
        self.state = ServingState.STALE
        self._answer(publish_id, fleet_pb2.PUBLISH_PHASE_FAILED, message=message)

    def _answer(
        self,
        publish_id: str,
        phase: fleet_pb2.PublishPhase,
        *,
        bucket_digests: list[bytes] | None = None,
        probe_logprobs: bytes = b"",
        message: str = "",
        paused_s: float = 0.0,
        stages: fleet_pb2.PublishStages | None = None,
    ) -> None:
        self._report(
            fleet_pb2.PublishReport(
                publish_id=publish_id,
                phase=fleet_pb2.PublishPhase.Name(phase),
                bucket_digests=bucket_digests or [],
                probe_logprobs=probe_logprobs,
                message=message,
                paused_s=paused_s,
                stages=stages,
            )
        )
