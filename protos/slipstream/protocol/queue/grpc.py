"""Carries trajectories over a gRPC stream; the sender keeps each until it is acknowledged.

The sender sends each trajectory that `put` gets; on a new stream it sends all unacknowledged
trajectories again. `put` waits while too many bytes are unacknowledged. After a lost stream the
sender pauses before it connects again. The receiver reads the streams of all senders, and `get`
returns the trajectories. While too many bytes wait for `get`, the receiver does not read the
streams.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from slipstream.core.backoff import Backoff
from slipstream.core.errors import QueueError
from slipstream.core.settings.config import Config
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.base import (
    ByteBudget,
    Delivery,
    EpochAmounts,
    OpenSeal,
    Tally,
    opened,
)
from slipstream.protocol.rich_errors import REFUSALS
from slipstream.v1 import trajectory_pb2 as pb
from slipstream.v1 import trajectory_pb2_grpc

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
REFUSAL_WAIT_S = 0.2
MAX_IDS_IN_RESPONSE = 4096

# The trajectories that one stream has yet to acknowledge.
_Answers: TypeAlias = asyncio.Queue[TrajectoryId]
DeliverCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.DeliverRequest, pb.DeliverResponse]"

logger = logging.getLogger(__name__)


class GrpcSender:
    """Sends trajectories in the background while its `async with` block runs.

    A refusal by the controller ends the block with an ExceptionGroup of a QueueError. After a lost
    connection the sender connects again. What is unacknowledged at the end of the block is lost.
    """

    def __init__(
        self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]], max_bytes: int
    ) -> None:
        """Limits the unacknowledged bytes to `max_bytes`; the caller closes `channel`."""
        stub = trajectory_pb2_grpc.TrajectoryServiceStub(channel)
        self._deliver = stub.Deliver
        self._metadata = metadata
        self._budget = ByteBudget(max_bytes)
        self._unacknowledged: dict[TrajectoryId, pb.DeliverRequest] = {}
        self._sent, self.taken = EpochAmounts(), EpochAmounts()
        # Trajectories whose `put` waits for room.
        self._without_room: set[TrajectoryId] = set()
        self._to_send: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._group = asyncio.TaskGroup()
        self._running: asyncio.Task[None]
        self._closed = True

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._running = self._group.create_task(self._run())
        self._closed = False
        return self

    async def __aexit__(self, *raised: Any) -> None:  # noqa: ANN401 - passed on
        self._closed = True
        self._running.cancel()
        await self._group.__aexit__(*raised)

    @property
    def queued_bytes(self) -> int:
        return self._budget.used_bytes

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        return [*self._unacknowledged, *self._without_room]

    async def put(
        self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float, tokens: int = 0
    ) -> None:
        """Stores a trajectory like `TrajectorySender.put`, unless its id is stored already."""
        if self._closed:
            raise QueueError("the sender is closed")
        if trajectory_id not in self._unacknowledged:
            self._without_room.add(trajectory_id)
            try:
                await self._budget.acquire(len(data), timeout_s=timeout_s)
            finally:
                self._without_room.discard(trajectory_id)
            if trajectory_id in self._unacknowledged:
                # A second call put the same id while both waited.
                self._budget.release(len(data))
            else:
                sent = self._sent.add(trajectory_id, tokens).to_pb()
                self._unacknowledged[trajectory_id] = pb.DeliverRequest(
                    trajectory=data, trajectory_id=trajectory_id, tokens=tokens, sent=sent
                )
                self._to_send.put_nowait(trajectory_id)
        self.taken.add(trajectory_id, tokens)

    async def _run(self) -> None:
        while True:
            # A restarted controller gets the trajectories it lacks before it leases them again.
            call = self._deliver(metadata=self._metadata, wait_for_ready=True)
            self._to_send = asyncio.Queue()
            for trajectory_id in self._unacknowledged:
                self._to_send.put_nowait(trajectory_id)
            try:
                async with asyncio.TaskGroup() as group:
                    writer = group.create_task(self._write(call))
                    failure = await self._read(call)
                    writer.cancel()
            finally:
                call.cancel()
            cause = "the controller closed the stream"
            if failure is not None:
                if failure.code() in REFUSALS:
                    text = f"trajectories are refused: {failure.details()}"
                    raise QueueError(text) from failure
                cause = str(failure.details())
            # A call that fails while it is cancelled swallows the cancellation.
            if self._closed:
                return
            waiting = f"{len(self._unacknowledged)} trajectories of {self.queued_bytes} bytes"
            again = f"{waiting} are sent again in {self._backoff.next_s:.1f} s"
            logger.warning("the stream of trajectories was lost: %s; %s", cause, again)
            await asyncio.sleep(self._backoff.take_s())

    async def _write(self, call: DeliverCall) -> None:
        try:
            if not self._backoff.is_fresh:
                # A write to a stream that is being refused hides the reason from `_read`.
                await asyncio.sleep(REFUSAL_WAIT_S)
            while True:
                request = self._unacknowledged.get(await self._to_send.get())
                if request is not None:
                    await call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended: `_read` returns the reason.
            return

    async def _read(self, call: DeliverCall) -> grpc.aio.AioRpcError | None:
        try:
            async for response in call:
                self._backoff.reset()
                for acknowledged in response.acknowledged_ids:
                    request = self._unacknowledged.pop(TrajectoryId(acknowledged), None)
                    if request is not None:
                        self._budget.release(len(request.trajectory))
        except grpc.aio.AioRpcError as error:
            return error
        return None


class GrpcReceiver(trajectory_pb2_grpc.TrajectoryServiceServicer):
    """The controller's end of the queue, a servicer to add to the controller's gRPC server."""

    def __init__(self, open_seal: OpenSeal, *, max_waiting_bytes: int = 64 << 20) -> None:
        """Limits the bytes received but not yet taken by `get` to `max_waiting_bytes`.

        A delivery that `open_seal` refuses ends its stream.
        """
        self._open_seal = open_seal
        self._waiting: asyncio.Queue[Delivery] = asyncio.Queue()
        self._budget = ByteBudget(max_waiting_bytes)
        # For each unacknowledged trajectory, the answers of the newest stream that delivered it.
        self._answers: dict[TrajectoryId, _Answers] = {}
        self.given = Tally()
        # Always empty: senders keep unacknowledged trajectories.
        self.backlog: Sequence[TrajectoryId] = ()

    async def waiting(self) -> Sequence[TrajectoryId]:
        """Returns nothing: senders keep unacknowledged trajectories."""
        return ()

    async def get(self) -> Delivery:
        """Waits for the next trajectory and returns it; see `TrajectoryReceiver`."""
        delivery = await self._waiting.get()
        self.given = self.given.plus(delivery.tokens)
        self._budget.release(self._charge(delivery.data))
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Makes the senders drop these trajectories; does not wait for the senders."""
        for trajectory_id in trajectory_ids:
            if (answers := self._answers.pop(trajectory_id, None)) is not None:
                answers.put_nowait(trajectory_id)

    async def Deliver(  # noqa: N802 - the name in the .proto file
        self,
        request_iterator: AsyncIterable[pb.DeliverRequest],
        context: grpc.aio.ServicerContext[pb.DeliverRequest, pb.DeliverResponse],
    ) -> None:
        """Receives the trajectories of one sender until its stream ends."""
        answers: _Answers = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(answers, context))
            await self._read(answers, request_iterator)
            writer.cancel()

    async def _read(self, answers: _Answers, requests: AsyncIterable[pb.DeliverRequest]) -> None:
        async for request in requests:
            delivery = await opened(self._open_seal, request)
            self._answers[delivery.trajectory_id] = answers
            # The wait has no limit, at most until the handler ends: senders must wait while
            # `get` is not called.
            await self._budget.acquire(self._charge(delivery.data), timeout_s=None)
            self._waiting.put_nowait(delivery)

    async def _write(
        self,
        answers: _Answers,
        context: grpc.aio.ServicerContext[pb.DeliverRequest, pb.DeliverResponse],
    ) -> None:
        while True:
            ids = [await answers.get()]
            while len(ids) < MAX_IDS_IN_RESPONSE and not answers.empty():
                ids.append(answers.get_nowait())
            await context.write(pb.DeliverResponse(acknowledged_ids=ids))

    def _charge(self, data: bytes) -> int:
        # A single trajectory must fit any limit.
        return min(len(data), self._budget.max_bytes)


def sender(
    config: Config,
    channel: grpc.aio.Channel,
    metadata: Sequence[tuple[str, str]],
    _run_id: str,
) -> GrpcSender:
    """Returns the sender of a rollout server, whose calls go to its controller."""
    return GrpcSender(channel, metadata, config.queue.max_bytes)
