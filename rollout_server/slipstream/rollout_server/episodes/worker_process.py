"""One environment worker as a process: its start, what it was doing, its end and the cause of that.

The process that the server starts is a keeper (`slipstream.protocol.keeper`), with the worker below
it: with the keeper ends whatever the environment has started, also when the server is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from slipstream.protocol.call_record import CallRecord
from slipstream.rollout_server.process import worker_environment

# What a keeper needs to end all that is below it, on a machine that is busy with just that.
_STOP_LIMIT_S = 30.0
_MAX_CAUSE_BYTES = 1000


@dataclass(frozen=True)
class WorkerLimits:
    """Bounds of a worker with all that it has started; 0: none."""

    memory_bytes: int = 0
    processes: int = 0

    def arguments(self) -> list[str]:
        """The limits as a keeper takes them."""
        return [
            *("--memory-bytes", str(self.memory_bytes)),
            *("--memory-setting", "rollout_server.environment_memory_gib"),
            *("--processes", str(self.processes)),
            *("--processes-setting", "rollout_server.environment_processes"),
        ]


NO_LIMITS = WorkerLimits()


class WorkerProcess:
    """Owns the process and the two files that outlive it; `close` ends all three."""

    def __init__(self, process: asyncio.subprocess.Process, record: int, cause: int) -> None:
        self._process = process
        self._record = record
        self._cause = cause

    @classmethod
    async def start(
        cls, command: Sequence[str], *, limits: WorkerLimits, token: str, log: int
    ) -> Self:
        """Starts `command` with `--record`; OSError when there can be no more processes."""
        record = os.memfd_create("calls", os.MFD_CLOEXEC)
        cause = os.memfd_create("cause", os.MFD_CLOEXEC)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.protocol.keeper"),
                *("--cause-fd", str(cause), *limits.arguments()),
                *("--", *command, "--record", str(record)),
                env=worker_environment(os.environ, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(record, cause),
                start_new_session=True,
            )
        except BaseException:
            os.close(record)
            os.close(cause)
            raise
        return cls(process, record, cause)

    def calls(self) -> CallRecord:
        """What the worker answers at this moment, or answered when it ended."""
        return CallRecord.read(self._record)

    async def wait(self) -> str:
        """Waits for the end of the worker; the cause in words."""
        code = await self._process.wait()
        said = os.pread(self._cause, _MAX_CAUSE_BYTES, 0).decode(errors="replace").strip()
        if said:
            return f"worker was ended: {said}"
        if code < 0:
            return f"worker was killed by {signal.Signals(-code).name}"
        return f"worker exited with code {code}"

    def end(self) -> None:
        """Tells the keeper to end everything."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        """Returns when the worker and all that it has started are gone."""
        if self._process.returncode is None:
            self.end()
            try:
                async with asyncio.timeout(_STOP_LIMIT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        os.close(self._record)
        os.close(self._cause)
