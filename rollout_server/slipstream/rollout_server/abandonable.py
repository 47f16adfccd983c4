"""A wait that another task may end early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Abandonable:
    """One call at a time: `run` awaits it, and `abandon` ends that early."""

    def __init__(self) -> None:
        self._abandoned: asyncio.Future[None] | None = None

    def abandon(self) -> None:
        """Ends the call under way, if there is one."""
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    async def run(self, call: Coroutine[Any, Any, None]) -> bool:
        """Awaits `call` and raises its error; False: it was abandoned, and has ended."""
        abandoned = self._abandoned = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(call)
        try:
            await asyncio.wait((running, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return False
            running.result()
            return True
        finally:
            self._abandoned = None
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
