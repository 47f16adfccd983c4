"""The calls to the controller of a command that has started parts of a run."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from slipstream.client.launch.children import Child
from slipstream.client.launch.display import Display
from slipstream.client.launch.trainer_ranks import Milestones
from slipstream.client.status import RunStatus, run_from_pb
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc

# Seconds of silence before the first such line; twice as long before each further one, to a limit.
FIRST_S = 20.0
LIMIT_S = 300.0
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
        """Returns how far the run is, or None if the controller does not answer."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            status = await self.status()
            return Milestones(status.step, status.checkpoint_step)
        return None

    async def has_trainer(self) -> bool:
        """Whether a trainer has loaded and registered; False when the controller is silent."""
        return await self._state() not in (None, status_pb2.RUN_STATE_STARTING)

    async def is_stopping(self) -> bool:
        """Whether the trainer saves and exports now; False when the controller does not answer."""
        return await self._state() == status_pb2.RUN_STATE_STOPPING

    async def status(self) -> status_pb2.RunStatus:
        """Returns the run at this moment; raises AioRpcError if the controller does not answer."""
        async with self.channel() as channel:
            status: status_pb2.RunStatus
            status = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), metadata=self.metadata, timeout=ANSWER_LIMIT_S
            )
            return status

    async def _state(self) -> int | None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await self.status()).state
        return None


async def end_in_order(
    ends: asyncio.Future[Child | None],
    calls: RunCalls,
    *,
    grace_s: float,
    look_s: float = LOOK_S,
) -> None:
    """Stops the run, and gives the ranks of this node `grace_s` after it was last seen stopping.

    A cluster stops all nodes at once or this one alone: rank 0 lets all ranks save and export.
    """
    stop = asyncio.ensure_future(calls.stop("a node of the learner leaves", failed=False))
    looks = 0
    while not ends.done() and looks < grace_s / look_s:
        looks = 0 if await calls.is_stopping() else looks + 1
        await asyncio.wait((ends,), timeout=look_s)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)


async def tell_waits(
    display: Display, calls: RunCalls, *, first_s: float = FIRST_S, longest_s: float = LIMIT_S
) -> None:
    """Asks the controller whenever nothing was shown for long; never returns."""
    patience_s, last_line_s = first_s, 0.0
    while True:
        if display.spoke_s != last_line_s:
            patience_s = first_s
        if display.quiet_s < patience_s:
            last_line_s = display.spoke_s
            await asyncio.sleep(patience_s - display.quiet_s)
            continue
        try:
            display.tell(wait_line(run_from_pb(await calls.status())))
        except grpc.aio.AioRpcError as error:
            display.warn(f"the controller gives no answer: {error.code().name}")
        last_line_s = display.spoke_s
        patience_s = min(2 * patience_s, longest_s)


def wait_line(run: RunStatus) -> str:
    """Returns what a run waits for, in one line."""
    busy = [
        f"{s.server_id} {'has left' if s.state == 'left' else f'is {s.state}'}"
        for s in run.servers
        if s.state != "serving"
    ]
    servers = "; ".join(busy) if run.servers else "no rollout server has joined yet"
    if run.servers and all(s.state in ("left", "dead") for s in run.servers):
        servers += "; no rollout server is connected"
    waits = f"waits for {run.waiting_for}" if run.waiting_for else f"the run is {run.state}"
    return waits + (f"; {servers}" if servers else "")
