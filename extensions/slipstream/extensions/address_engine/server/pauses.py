"""Pauses of the engine at an address, and the watch over who else commands it.

Consumes: orders to pause and to resume. Waits for: the server's answers. Unblocked by: these, or
the limit of an answer, after which the engine counts as hung.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from slipstream.core.types import PolicyVersion
from slipstream.extensions.address_engine.server.connection import Connection
from slipstream.extensions.address_engine.server.stamps import Stamps, foreign
from slipstream.rollout_server.engine_interface import EngineDied
from slipstream.rollout_server.usage import UseClock

# Seconds between two looks at who commands the server, and the limit of an answer.
WATCH_PERIOD_S = 2.0
ANSWER_LIMIT_S = 60.0


class AddressPauses:
    """The pauses of one server, which has one master: this object."""

    def __init__(self, connection: Connection, stamps: Stamps) -> None:
        self._connection = connection
        self._stamps = stamps
        self.version: PolicyVersion | None = None
        self.clock = UseClock()
        # Held while the server is between two states; orders come one after another.
        self._changing = asyncio.Lock()
        self._num_changes = 0
        # The version and state in which the server must be while nothing changes it.
        self._stamp = stamps.unserved
        self._is_paused = True

    async def claim(self) -> None:
        """Pauses the server and takes its version away from whoever gave it."""
        async with self.change():
            await self._pause()
            await self._name(self._stamps.unserved)

    async def pause(self) -> None:
        async with self.change():
            await self._pause()

    async def rest(self, *, give_back: bool) -> None:
        """Pauses like `pause`; `controller.turns` is off, so that no memory is asked for."""
        await self.pause()

    async def resume(self, version: PolicyVersion) -> None:
        async with self.change():
            # A stranger's resume between load and label would stamp tokens of a mixture.
            if not await self._is_paused_there():
                raise EngineDied(self._resumed_by_another())
            await self._name(self._stamps.of(version))
            await self._connection.control("POST", "/resume", limit_s=ANSWER_LIMIT_S)
            self._is_paused = False
            self.version = version
            self.clock.resume()

    @contextlib.asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Keeps `watch` from judging the server while the block changes it."""
        async with self._changing:
            self._num_changes += 1
            yield

    async def pause_within(self) -> None:
        """Pauses the server inside a block of `change`."""
        await self._pause()

    async def check_paused(self) -> None:
        """Raises EngineDied if another has resumed the server inside a block of `change`."""
        if not await self._is_paused_there():
            raise EngineDied(self._resumed_by_another())

    async def watch(self) -> None:
        """Raises EngineDied once the server is gone, hangs, or obeys another; never returns."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if not self._changing.locked():
                await self.look()

    async def look(self) -> None:
        """Compares the server with what it was told last; see `watch`."""
        num_changes = self._num_changes
        stamp = self._stamp
        is_paused = self._is_paused
        actual = await self._stamp_there()
        is_paused_there = await self._is_paused_there()
        if num_changes != self._num_changes or self._changing.locked():
            return
        if actual != stamp:
            raise EngineDied(foreign(actual, stamp))
        if is_paused and not is_paused_there:
            raise EngineDied(self._resumed_by_another())
        if is_paused_there and not is_paused:
            raise EngineDied(f"another program has paused the engine at {self._connection.url}")

    async def _pause(self) -> None:
        self.clock.pause()
        await self._connection.control(
            "POST",
            "/pause",
            limit_s=ANSWER_LIMIT_S,
            query={"mode": "keep", "clear_cache": "true"},
        )
        self._is_paused = True

    async def _name(self, stamp: str) -> None:
        """Gives the server's weights a name, and reads it back."""
        body = {"new_version": stamp}
        await self._connection.control(
            "POST", "/update_weight_version", limit_s=ANSWER_LIMIT_S, body=body
        )
        self._stamp = stamp
        actual = await self._stamp_there()
        if actual != stamp:
            raise EngineDied(foreign(actual, stamp))

    async def _stamp_there(self) -> object:
        answer = await self._connection.control("GET", "/weight_info", limit_s=ANSWER_LIMIT_S)
        return answer.get("weight_version")

    async def _is_paused_there(self) -> bool:
        answer = await self._connection.control("GET", "/is_paused", limit_s=ANSWER_LIMIT_S)
        return answer.get("is_paused") is True

    def _resumed_by_another(self) -> str:
        return f"another program has resumed the engine at {self._connection.url}"
