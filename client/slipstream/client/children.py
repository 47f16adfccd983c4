"""The processes that a command starts: each with its own log file, none outlives the command.

Waits for: the ends of the processes. Unblocked by: their ends; `stop` ends them all, by force after
its grace time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 65536


@dataclass(eq=False)
class Child:
    """One running program."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.returncode is None

    def describe_end(self) -> str:
        """How it ended, with the last line that it wrote."""
        code = self.process.returncode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        said = last_line(self.log_path)
        return f"{self.name} {how}" + (f": {said}" if said else "") + f" (log: {self.log_path})"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def stop(self, grace_s: float) -> None:
        """Asks it to end; after `grace_s` ends it by force, with what is left of its group."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
        self.signal(signal.SIGKILL)
        await self.process.wait()


async def start_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log_path: Path,
    environ: Mapping[str, str] = {},
) -> Child:
    """Starts `python -m module arguments` in its own process group, its output in `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, *arguments]
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "slipstream.protocol.process", *command],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    return Child(name, process, log_path)


def last_line(path: Path) -> str:
    """The last line of a log that says something, preferably one of our own; empty: none does."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # A traceback of several errors at once is drawn with lines of these.
    lines = [line.strip().lstrip("|+- ") for line in text.splitlines()]
    spoken = [line for line in lines if line.startswith("slipstream: ")]
    chosen = spoken or [line for line in lines if line]
    return chosen[-1].removeprefix("slipstream: ") if chosen else ""
