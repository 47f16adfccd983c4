"""The calls to the controller of a command that has started parts of a run."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc.aio
from slipstream.client.launch.children import Child
from slipstream.client.launch.trainer_ranks import Milestones
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc

STOP_LIMIT_S = 30.0
ANSWER_LIMIT_S = 5.0
# Seconds between two questions to the controller whether the run is still stopping.
LOOK_S = 2.0


class RunCalls:
    """Calls the controller at `address`; that it does not answer is no error."""

    def __init__(
        self, address: str, credentials: Credentials, *, stop_limit_s: float = STOP_LIMIT_S
    ) -> None:
        """`stop_limit_s`: seconds in which the controller must answer `stop`."""
        self._address, self._credentials = address, credentials
        self._stop_limit_s = stop_limit_s
        self.metadata = call_metadata(credentials)

    def channel(self) -> grpc.aio.Channel:
        """Opens a new connection; close it after use."""
        return open_channel(self._address, self._credentials)

    async def stop(self, reason: str, *, failed: bool) -> str:
        """Ends the run in order, or as failed; waits for a controller that does not listen yet.

        Returns "" when the controller answered, else the name of the gRPC status.
        """
        request = status_pb2.StopRunRequest(reason=reason, failed=failed)
        try:
            async with self.channel() as channel:
                await status_pb2_grpc.StatusServiceStub(channel).StopRun(
                    request,
                    metadata=self.metadata,
                    timeout=self._stop_limit_s,
                    wait_for_ready=True,
                )
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return ""

    async def milestones(self) -> Milestones | None:
        """Returns how far the run is; None when the controller does not answer."""
        status = await self._status()
        return None if status is None else Milestones(status.step, status.checkpoint_step)

    async def has_trainer(self) -> bool:
        """Whether a trainer has loaded and registered; False when the controller is silent."""
        status = await self._status()
        return status is not None and status.state != status_pb2.RUN_STATE_STARTING

    async def is_stopping(self) -> bool:
        """Whether the trainer saves and exports now; False when the controller does not answer."""
        status = await self._status()
        return status is not None and status.state == status_pb2.RUN_STATE_STOPPING

    async def _status(self) -> status_pb2.RunStatus | None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self.channel() as channel:
                status: status_pb2.RunStatus = await status_pb2_grpc.StatusServiceStub(
                    channel
                ).GetStatus(
                    status_pb2.GetStatusRequest(), metadata=self.metadata, timeout=ANSWER_LIMIT_S
                )
                return status
        return None


async def end_in_order(
    ends: asyncio.Future[Child | None],
    calls: RunCalls,
    *,
    grace_s: float,
    look_s: float = LOOK_S,
) -> None:
    """Gives the ranks of this node `grace_s` to end, and more while the run is stopping.

    A cluster stops all nodes at once: then rank 0 lets all ranks save and export.
    """
    until_s = time.monotonic() + grace_s
    while not ends.done() and (time.monotonic() < until_s or await calls.is_stopping()):
        await asyncio.wait((ends,), timeout=look_s)
