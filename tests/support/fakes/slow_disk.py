"""A disk on which a sync ends when the test says so."""

import asyncio
import os
import threading

import pytest

from support.rigs.waiting import LIMIT_S


class SlowDisk:
    """`os.fsync` of the whole process, from `hold` to `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go_on, self._begun = threading.Event(), threading.Event()
        self._go_on.set()
        self._fsync = os.fsync
        self.num_syncs = 0
        # The number of the error with which each sync fails, or 0.
        self.fails = 0
        monkeypatch.setattr(os, "fsync", self._sync)

    def hold(self) -> None:
        """Syncs that begin from now on wait for `go_on`."""
        self._begun.clear()
        self._go_on.clear()

    def wait_begun(self) -> None:
        """Returns when one waits."""
        assert self._begun.wait(LIMIT_S)

    def go_on(self) -> None:
        """Ends the waiting ones, and those to come at once."""
        self._go_on.set()

    def _sync(self, descriptor: int) -> None:
        self.num_syncs += 1
        self._begun.set()
        assert self._go_on.wait(LIMIT_S)
        if self.fails:
            raise OSError(self.fails, os.strerror(self.fails))
        self._fsync(descriptor)


async def several_turns() -> None:
    """Lets the loop do all that it can."""
    for _ in range(20):
        await asyncio.sleep(0)
