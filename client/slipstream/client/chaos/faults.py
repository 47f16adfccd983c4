"""Faults of real processes of one run: the run's own process table, and a proxy between two.

The kernel may give a pid to another process, so each process is signalled through a handle.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.machine.descendants import Descendant, descendants

# What stands in the command line of a part of a run, from the most special on.
_PARTS = {
    "slipstream.learner.controller": "controller",
    "slipstream.learner.trainer": "rank",
    "slipstream.core.machine.keeper": "keeper",
    "slipstream.client.worker": "worker",
    "slipstream.rollout_server": "server",
    "VLLM": "engine",
    "valkey-server": "queue",
    "redis-server": "queue",
}
ROLES = ("command", *dict.fromkeys(_PARTS.values()))
# Seconds within which the kernel shows the effect of a signal.
EFFECT_S = 10.0
_LOOK_S = 0.01
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Process:
    """A process of a run, and its role there."""

    role: str
    place: Descendant


def process_table(command: int) -> list[Process]:
    """Returns the processes of the run that the process `command` started, with itself."""
    found = [Process("command", Descendant(command, _stat(command)[1]))]
    for place in descendants(command):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{place.pid}/cmdline").read_text(errors="replace")
            role = next((role for mark, role in _PARTS.items() if mark in line), None)
            # Between fork and exec a process still has the command line of its parent.
            if role is not None and "slipstream.core.machine.process" not in line:
                found.append(Process(role, place))
    return found


def send(process: Process, number: signal.Signals) -> bool:
    """Sends a signal to exactly this process; returns whether it was still there."""
    try:
        handle = os.pidfd_open(process.place.pid)
    except ProcessLookupError:
        return False
    try:
        if _stat(process.place.pid)[1] != process.place.start:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def is_dead(process: Process) -> bool:
    """Whether the kernel has ended the process."""
    state, start = _stat(process.place.pid)
    return start != process.place.start or state in "ZX"


def is_stopped(process: Process) -> bool:
    """Whether the kernel has stopped the process."""
    return _stat(process.place.pid) == ("T", process.place.start)


def _stat(pid: int) -> tuple[str, int]:
    """The state and start time of a process; ("X", 0) if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


async def kill(process: Process) -> bool:
    """Kills a process; returns whether this ended it."""
    return send(process, signal.SIGKILL) and await _shown(process, is_dead)


async def stop(process: Process, for_s: float) -> bool:
    """Stops a process for a time; returns whether it stood still."""
    if not send(process, signal.SIGSTOP):
        return False
    try:
        if not await _shown(process, is_stopped):
            return False
        await asyncio.sleep(for_s)
        return True
    finally:
        send(process, signal.SIGCONT)


async def _shown(process: Process, effect: Callable[[Process], bool]) -> bool:
    until_s = time.monotonic() + EFFECT_S
    while not effect(process):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


class Proxy:
    """Carries TCP connections from a free port of loopback to `target`, and does them harm."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        # Seconds by which each piece is late; while `_open` is not set, nothing is carried.
        self._late_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._break()

    @property
    def address(self) -> str:
        """The address at which it listens."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def cut(self, for_s: float) -> bool:
        """Breaks all connections and refuses new ones for a time; returns whether any broke."""
        self._refuses = True
        broken = self._break()
        await asyncio.sleep(for_s)
        self._refuses = False
        return broken > 0

    async def half_open(self, for_s: float) -> bool:
        """Carries nothing for a time, and says so to nobody; then breaks what hung."""
        self._open.clear()
        await asyncio.sleep(for_s)
        broken = self._break()
        self._open.set()
        return broken > 0

    async def delay(self, for_s: float, late_s: float = 0.2) -> bool:
        """Delays each piece for a time; returns whether there was a connection to delay."""
        self._late_s = late_s
        await asyncio.sleep(for_s)
        self._late_s = 0.0
        return bool(self._pairs)

    def _break(self) -> int:
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        return len(self._pairs)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refuses:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return
        finally:
            if self._refuses:
                writer.transport.abort()
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            ways = self._pump(reader, far_writer), self._pump(far_reader, writer)
            await asyncio.wait(map(asyncio.ensure_future, ways), return_when="FIRST_COMPLETED")
        finally:
            self._pairs.discard(pair)
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                await asyncio.sleep(self._late_s)
                writer.write(data)
                await writer.drain()
