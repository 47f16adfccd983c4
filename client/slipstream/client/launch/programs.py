"""Runs programs that check something for a command, and that end with the command.

Waits for: the end of the program itself, not of processes that it has started. Unblocked by: its
end, or the limit, at which it is killed with all that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TAIL_BYTES = 65536


@dataclass(frozen=True)
class Ended:
    """How a program ended, and the lines in the last `TAIL_BYTES` that it wrote to stderr."""

    # The exit code; None: the program did not end within its limit.
    code: int | None
    lines: tuple[str, ...]
    # What it wrote to stdout.
    output: str = ""


async def run_module(
    arguments: Sequence[str],
    *,
    limit_s: float,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `python -m arguments`, as `run_program` does."""
    command = [sys.executable, "-m", *arguments]
    return await run_program(command, limit_s=limit_s, given=given, environ=environ)


async def run_program(
    command: Sequence[str],
    *,
    limit_s: float,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `command` with `given` on its stdin."""
    # Files rather than pipes: a pipe stays open as long as anything that the program has started.
    file = tempfile.TemporaryFile
    with file() as stdin, file() as stdout, file() as stderr:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "slipstream.core.machine.keeper", "--"],
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environ,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    code = await process.wait()
        finally:
            # The keeper ends all that the program has started.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = stderr.read().decode(errors="replace")
        stdout.seek(0)
        output = stdout.read().decode(errors="replace")
        return Ended(code, tuple(text.strip().splitlines()), output)
