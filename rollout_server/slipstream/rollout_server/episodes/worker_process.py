"""One environment worker as a process: its start, its calls, its end and the cause of the end.

The server starts a keeper (`slipstream.core.machine.keeper`), which runs the worker as its child.
When the keeper ends, every process that the environment has started ends too, even if the server is
killed. If a keeper is killed, its orphans are reparented to the server, which is a subreaper and
ends them.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from slipstream.core.machine.process import is_reaper, kill_orphans, send_signal
from slipstream.protocol.call_record import CallRecord
from slipstream.rollout_server.process import worker_environment

# Seconds that a keeper needs, on a busy machine, to end all processes below it.
_STOP_LIMIT_S = 30.0
_MAX_CAUSE_BYTES = 1000
# Seconds between two checks for the orphans of a killed keeper.
_LOOK_S = 0.02


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker and all processes that it has started; 0 means no limit.

    Starts of a worker that does not attach are repeated for `start_s` seconds.
    """

    memory_bytes: int = 0
    processes: int = 0
    start_s: float = 0.0

    def arguments(self) -> list[str]:
        """Returns the limits as command-line arguments of a keeper."""
        return [
            *("--memory-bytes", str(self.memory_bytes)),
            *("--memory-setting", "rollout_server.environment_memory_gib"),
            *("--processes", str(self.processes)),
            *("--processes-setting", "rollout_server.environment_processes"),
        ]


NO_LIMITS = WorkerLimits()


class WorkerProcess:
    """Owns a keeper process and two memory files: its worker's calls, and why the worker ended.

    `close` ends the process and frees the files.
    """

    # The keepers that this process has started, and how many it is starting.
    _keepers: ClassVar[set[int]] = set()
    _num_starting: ClassVar[int] = 0

    def __init__(self, process: asyncio.subprocess.Process, record: int, cause: int) -> None:
        self._process, self._record, self._cause = process, record, cause

    @classmethod
    async def start(
        cls, command: Sequence[str], *, limits: WorkerLimits, token: str, log: int
    ) -> Self:
        """Starts a keeper that runs `command`, whose output goes to the file descriptor `log`.

        The worker gets the descriptor of its call record by `--record`, and authenticates with
        `token` (see `WorkerGateway.expect`). Raises OSError when no process can be started.
        """
        record = os.memfd_create("calls", os.MFD_CLOEXEC)
        cause = os.memfd_create("cause", os.MFD_CLOEXEC)
        WorkerProcess._num_starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.core.machine.keeper"),
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
        finally:
            WorkerProcess._num_starting -= 1
        cls._keepers.add(process.pid)
        return cls(process, record, cause)

    def calls(self) -> CallRecord:
        """Returns the calls that the worker is answering, or was answering when it ended."""
        return CallRecord.read(self._record)

    @property
    def was_killed(self) -> bool:
        return (self._process.returncode or 0) < 0

    async def wait(self) -> str:
        """Waits for the end of the worker; returns the cause in words."""
        code = await self._process.wait()
        said = os.pread(self._cause, _MAX_CAUSE_BYTES, 0).decode(errors="replace").strip()
        if said:
            return f"worker was ended: {said}"
        if code < 0:
            return f"worker was killed by {signal.Signals(-code).name}"
        return f"worker exited with code {code}"

    def end(self) -> None:
        """Asks the keeper to end the worker and all processes below it; does not wait."""
        send_signal(self._process, signal.SIGTERM)

    async def close(self) -> None:
        """Ends the worker, and kills it if it has not ended after `_STOP_LIMIT_S` seconds.

        If a signal ended the worker, this also kills the processes that the worker left behind, for
        at most the same time.
        """
        if self._process.returncode is None:
            self.end()
            try:
                async with asyncio.timeout(_STOP_LIMIT_S):
                    await self._process.wait()
            except TimeoutError:
                send_signal(self._process, signal.SIGKILL)
                await self._process.wait()
        self._keepers.discard(self._process.pid)
        if self.was_killed and is_reaper():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_LIMIT_S):
                    # A keeper that is being started has its own session, and is not known yet.
                    while self._num_starting or kill_orphans(self._keepers):
                        await asyncio.sleep(_LOOK_S)
        os.close(self._record)
        os.close(self._cause)
