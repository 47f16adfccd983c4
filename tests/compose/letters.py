"""An environment of the user's, in the folder that the compose file mounts for such modules."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.client.environment import Message
from slipstream.environments.echo import Echo, Pair


class PacedEcho(Echo):
    """Begins no episode while a file `hold` lies beside this module."""

    def __init__(self, pace_s: float) -> None:
        super().__init__()
        self._pace_s = pace_s

    async def reset(self, task: Pair) -> list[Message]:
        """Waits `pace_s`, so that a run is long enough to kill its parts."""
        await asyncio.sleep(self._pace_s)
        while Path(__file__).with_name("hold").exists():
            await asyncio.sleep(0.1)
        return super().reset(task)
