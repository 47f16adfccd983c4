"""The controller's service for the HTTP process of a client's own loop.

Consumes: operations, questions for results. Produces: operations on the disk, results. Waits for:
the disk, and the end of an operation. Unblocked by: the end of a write, the operation, or the limit
of the call.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
from slipstream.core.errors import ProtocolError
from slipstream.core.waits import within
from slipstream.extensions.tinker.models import Entry, Models
from slipstream.extensions.tinker.operation_store import OperationStore
from slipstream.extensions.tinker.samples import Samples
from slipstream.extensions.tinker.turns import Turns
from slipstream.learner.controller.servers.session import CallContext, Outbox
from slipstream.protocol.checkpoints import write_kept
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc

# Most training operations of a session that may wait: others are sent again.
MAX_WAITING = 4096


class OperationServicer(operations_pb2_grpc.OperationServiceServicer):
    """Takes operations, each once, and tells their results."""

    def __init__(
        self,
        store: OperationStore,
        checkpoints: Path,
        entries: dict[str, Entry],
        models: Models,
        samples: Samples,
        turns: Turns,
        *,
        queue: Callable[[Entry], None],
    ) -> None:
        """Takes what lets an operation that is on the disk wait for its turn."""
        self._store = store
        self._checkpoints = checkpoints
        self._entries = entries
        self._models = models
        self._samples = samples
        self._turns = turns
        self._queue = queue
        # The operations that the disk has had.
        self.num_stored = 0
        self._lock = asyncio.Lock()

    async def Submit(self, request: pb.Operation, context: CallContext) -> pb.OperationReceipt:  # noqa: N802
        """Adds a training operation, which is on the disk then, unless it is known."""
        if request.HasField("sample"):
            raise ProtocolError(f"{request.id} is a sample, which goes on the stream of samples")
        request.trainer_ends = 0
        # A caller that goes leaves nothing on the disk that is not known: it would be there twice.
        status, cause = await asyncio.shield(self._add(request))
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            await abort(context, status, cause, Reason.TOO_MANY_CALLS)
        elif status is not grpc.StatusCode.OK:
            await abort(context, status, cause, Reason.WRONG_STATE)
        return pb.OperationReceipt()

    async def _add(self, request: pb.Operation) -> tuple[grpc.StatusCode, str]:
        """Adds an operation unless it is known; returns why its client must wait, or is wrong."""
        session = request.stream.partition(":")[0]
        async with self._lock:
            entry = self._entries.get(request.id)
            if entry is not None:
                if entry.operation.digest == request.digest:
                    return grpc.StatusCode.OK, ""
                cause = f"{request.id} is known with other content: number the new operation anew"
                return grpc.StatusCode.ALREADY_EXISTS, cause
            num_waiting = self._turns.num_of(session)
            if num_waiting >= MAX_WAITING:
                cause = f"{num_waiting} requests of session {session} wait: send more when some"
                return grpc.StatusCode.RESOURCE_EXHAUSTED, f"{cause} are done"
            place = self.num_stored
            self.num_stored += 1
            try:
                await asyncio.to_thread(self._store.write, place, request)
            except ProtocolError as error:
                # The run that goes on in this folder takes it.
                return grpc.StatusCode.UNAVAILABLE, str(error)
            entry = Entry(request, place)
            self._entries[request.id] = entry
            self._queue(entry)
        return grpc.StatusCode.OK, ""

    async def Keep(self, request: pb.KeepRequest, context: CallContext) -> pb.KeepReceipt:  # noqa: N802
        """Changes how long the name of a publish or save holds, or deletes it."""
        async with self._lock:
            by_name = self._models.named
            target = by_name.get(request.name)
            entry = None if target is None else target.entry
            if entry is None or entry.place is None:
                return pb.KeepReceipt(is_unknown=True)
            operation = entry.operation
            operation.kept.CopyFrom(request.kept)
            try:
                await asyncio.to_thread(self._store.write, entry.place, operation)
            except ProtocolError as error:
                unavailable = grpc.StatusCode.UNAVAILABLE
                await abort(context, unavailable, str(error), Reason.WRONG_STATE)
            is_same = by_name.get(request.name) is target
            if request.kept.is_deleted and is_same:
                del by_name[request.name]
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
