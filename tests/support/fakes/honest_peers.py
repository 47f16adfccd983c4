"""An honest rollout server, trainer and client of a controller, in a process of their own.

    PYTHONPATH=tests python tests/support/fakes/honest_peers.py ADDRESS LATENCIES

The client asks for the status ten times a second and writes how long each answer took, in seconds.
The process ends when one of them does.
"""

import asyncio
import sys
import time
from pathlib import Path

from slipstream.protocol.access.security import open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc

from support.fakes.fake_server import OPEN, FakeServer
from support.fakes.fake_trainer import FakeTrainer

ASK_S = 0.1


async def ask(address: str, path: Path) -> None:
    async with open_channel(address, OPEN) as channel:
        status = status_pb2_grpc.StatusServiceStub(channel)
        with path.open("a", buffering=1) as file:
            while True:
                begun_s = time.monotonic()
                answer = await status.GetStatus(
                    status_pb2.GetStatusRequest(), timeout=60, wait_for_ready=True
                )
                file.write(f"{time.monotonic() - begun_s:.6f} {answer.step}\n")
                await asyncio.sleep(ASK_S)


async def main(address: str, latencies: str) -> None:
    peers = {
        "server": FakeServer(address, delay_s=0.2).run(),
        "trainer": FakeTrainer(address, step_s=0.5).run(),
        "client": ask(address, Path(latencies)),
    }
    tasks = [asyncio.create_task(peer, name=name) for name, peer in peers.items()]
    ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in ended:
        print(f"the {task.get_name()} has ended: {task.exception()!r}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
