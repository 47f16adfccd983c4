"""A run of a real controller with an honest server and trainer, in a thread of its own.

Tests that are no coroutines, those of hypothesis for one, say things to it by `do`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import grpc.aio
from slipstream.learner.controller.application import Controller
from slipstream.v1 import status_pb2, status_pb2_grpc

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import OPEN, open_named
from support.rigs.controller_runs import make_config
from support.rigs.waiting import until

Result = TypeVar("Result")
LIMIT_S = 60.0


class Complaints(logging.Handler):
    """Keeps what was logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # asyncio complains of the callers' generators, which end in their middle.
        if record.exc_info and record.name != "asyncio":
            self.lines.append(self.format(record))


class LiveRun:
    """A context manager; behind it the controller is stopped and its summary is there."""

    def __init__(self, folder: Path, **changes: object) -> None:
        """The trainer holds before step 2: the run is in its middle."""
        self.config = make_config(folder, **{"run__steps": 6, **changes})
        self.address = self.config.controller.address
        self.server = FakeServer(self.address)
        self.trainer = FakeTrainer(self.address)
        self.trainer.hold_at(2)
        self.complaints = Complaints()
        self.code = -1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live run")

    def __enter__(self) -> LiveRun:
        logging.getLogger().addHandler(self.complaints)
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call(self._end())
            self._call(_leave_none())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()
            logging.getLogger().removeHandler(self.complaints)

    def do(self, saying: Callable[[grpc.aio.Channel], Awaitable[Result]]) -> Result:
        """What comes of saying something to the controller; TimeoutError if nothing does."""

        async def said() -> Result:
            async with asyncio.timeout(LIMIT_S):
                return await saying(self.channel)

        return self._call(said())

    def start(self, doing: Awaitable[Result]) -> Future[Result]:
        """Begins something in the loop of the run."""

        async def run() -> Result:
            return await doing

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    @property
    def is_over(self) -> bool:
        return self._running.done()

    def stop(self) -> None:
        """Ends the run before its last step, as a user's stop does."""
        self._loop.call_soon_threadsafe(self._controller.stop, "the test is over")

    def summary(self) -> dict:
        """The summary of the run, which exists only after its end."""
        return json.loads((self.config.run_dir / "summary.json").read_text())

    async def _begin(self) -> None:
        self._controller = Controller(self.config, OPEN)
        self._running = asyncio.ensure_future(self._controller.run())
        self._peers = [
            asyncio.ensure_future(peer.run()) for peer in (self.server, self.trainer)
        ]
        self._open = open_named(self.address)
        self.channel = await self._open.__aenter__()
        await until(
            lambda: self.trainer.version.step >= self.trainer.gated_from, LIMIT_S
        )

    async def _end(self) -> None:
        """Lets the run go on to its own end."""
        self.trainer.gate.set()
        try:
            if not self.is_over:
                status = status_pb2_grpc.StatusServiceStub(self.channel)
                await status.GetStatus(status_pb2.GetStatusRequest(), timeout=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                self.code = await self._running
        finally:
            for task in (*self._peers, self._running):
                task.cancel()
            await asyncio.gather(*self._peers, self._running, return_exceptions=True)
            await self._open.__aexit__(None, None, None)

    def _call(self, doing: Awaitable[Result]) -> Result:
        return self.start(doing).result(2 * LIMIT_S)


async def _leave_none() -> None:
    """Ends what callers left in the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
