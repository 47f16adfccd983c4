"""Shows what a run waits for when nothing else was shown for a while, as in a long step.

Waits for: silence on the screen. Unblocked by: its owner, who cancels it.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from slipstream.client.launch.display import Display
from slipstream.client.status import RunStatus, run_from_pb
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc

# Seconds of silence before the first such line; twice as long before each further one, to a limit.
FIRST_S = 20.0
LIMIT_S = 300.0
ANSWER_LIMIT_S = 5.0


async def tell_waits(
    display: Display,
    address: str,
    credentials: Credentials,
    *,
    first_s: float = FIRST_S,
    longest_s: float = LIMIT_S,
) -> None:
    """Asks the controller at `address` whenever nothing was shown for long; never returns."""
    patience_s, last_line_s = first_s, 0.0
    async with open_channel(address, credentials) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        while True:
            if display.spoke_s != last_line_s:
                patience_s = first_s
            if display.quiet_s < patience_s:
                last_line_s = display.spoke_s
                await asyncio.sleep(patience_s - display.quiet_s)
                continue
            try:
                status = await stub.GetStatus(
                    status_pb2.GetStatusRequest(),
                    timeout=ANSWER_LIMIT_S,
                    metadata=call_metadata(credentials),
                )
                display.tell(wait_line(run_from_pb(status)))
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
