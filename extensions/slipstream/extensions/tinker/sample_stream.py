"""Samples of clients on one stream to the controller, and their results.

Consumes: samples, results. Produces: results for requests. Waits for: the controller, and a result,
as long as its request holds. Unblocked by: the result, or the end of the stream.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

import grpc.aio
from slipstream.extensions.tinker.operations import content_digest
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.protocol.bounds import check_bounds
from slipstream.v1 import operations_pb2 as pb

# Most samples of a session under way: others are sent again.
MAX_WAITING = 4096
# Most results that are kept here; the controller has the others for a while.
MAX_KEPT = 4096
# Most samples that one message tells of.
MAX_TOLD = 1024
# Longest time, in seconds, in which a controller that works takes a sample.
SEND_S = 30.0

logger = logging.getLogger(__name__)


class SampleStream:
    """Sends samples on one stream, which the first one opens, also after the last one's end."""

    def __init__(self, stub: Any, metadata: Any) -> None:  # noqa: ANN401 - gRPC's
        self._stub = stub
        self._metadata = metadata
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        # The samples without a result, and how many of them each session has.
        self._open: dict[str, asyncio.Future[None]] = {}
        self._sessions: Counter[str] = Counter()
        self._results: dict[str, pb.OperationResult] = {}
        # The digest of what each of these samples asks for.
        self._digests: dict[str, bytes] = {}
        # Samples whose clients have their results; the controller hears of it with the next sample.
        self._told: list[str] = []

    async def send(self, operation: pb.Operation) -> None:
        """Sends a sample unless it is under way.

        Raises ProtocolError if it is out of bounds, Refused if its client must send it again, or
        if another sample of its id is under way.
        """
        name = operation.id
        digest = content_digest(operation)
        if name in self._open or name in self._results:
            if self._digests.get(name, digest) != digest:
                cause = f"{name} is known with other content: number the new sample anew"
                raise Refused(cause, 409)
            return
        session = name.partition(":")[0]
        num_open = self._sessions[session]
        if num_open >= MAX_WAITING:
            cause = f"{num_open} samples of session {session} wait: send more when some are done"
            raise Refused(cause, 429)
        check_bounds(operation)
        loop = asyncio.get_running_loop()
        self._open[name] = loop.create_future()
        self._digests[name] = digest
        self._sessions[session] += 1
        try:
            async with asyncio.timeout(SEND_S), self._writing:
                if self._call is None:
                    self._call = self._stub.Sample(metadata=self._metadata)
                    self._reading = asyncio.ensure_future(self._read(self._call))
                operation.told.extend(self._told[:MAX_TOLD])
                del self._told[:MAX_TOLD]
                await self._call.write(operation)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            self._end(name)
            raise Refused("the controller does not answer", 503) from error
        except asyncio.CancelledError:
            # A sample that nobody sent would be under way for ever.
            self._end(name)
            raise

    async def result(self, name: str, limit_s: float) -> pb.OperationResult | None:
        """Returns the result of a sample, one that is not done after the limit, or None.

        None: this process does not have it, but the controller may.
        """
        if waiting := self._open.get(name):
            await asyncio.wait((waiting,), timeout=limit_s)
            if not waiting.done():
                return pb.OperationResult()
        if result := self._results.pop(name, None):
            self._told.append(name)
            self._digests.pop(name, None)
        return result

    async def close(self) -> None:
        """Ends the stream."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        try:
            async for result in call:
                self._results[result.id] = result
                if len(self._results) > MAX_KEPT:
                    oldest = next(iter(self._results))
                    del self._results[oldest]
                    self._digests.pop(oldest, None)
                self._end(result.id)
        except grpc.aio.AioRpcError as error:
            logger.warning("the stream of samples ended: %s", error.details())
        finally:
            call.cancel()
            self._call = None
            for name in list(self._open):
                self._end(name)

    def _end(self, name: str) -> None:
        """Wakes those who wait for a sample."""
        if waiting := self._open.pop(name, None):
            waiting.set_result(None)
            session = name.partition(":")[0]
            self._sessions -= Counter([session])
            if name not in self._results:
                self._digests.pop(name, None)
