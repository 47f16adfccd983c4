"""Runs one program with limits; when it ends, also ends all processes that it has started.

A run waits for the end of the program, an exceeded limit, or a cancellation. None of these leaves a
process behind.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.machine.process import send_signal
from slipstream.environments.sandbox.plan import Limits

# Bytes at the end of the output that are kept.
KEPT_BYTES = 16 << 10
# Begins a module with our own path: neither files of the folder nor variables of the program may
# decide what it imports.
_OWN_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
_CHUNK_BYTES = 64 << 10
# Seconds in which a keeper ends all processes below it, on a busy machine.
_END_LIMIT_S = 30.0


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program: its exit status, -N for signal N, and the last part of its output.

    `limit` says in words which limit ended the program; it is "" if none did.
    """

    status: int
    output: str
    limit: str = ""

    @property
    def cause(self) -> str:
        """The reason why the program ended, in words, or "" for exit status 0 within its limits."""
        if self.limit or not self.status:
            return self.limit
        if self.status > 0:
            return f"exit status {self.status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"it was ended by {names.get(-self.status, f'signal {-self.status}')}"

    @property
    def last_line(self) -> str:
        """The last line of the output that is not empty, or "" if there is none."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


async def run_program(
    command: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    limits: Limits,
    with_errors: bool = True,
) -> ProgramEnd:
    """Runs `command` in `folder`, with `variables` as its environment, and returns how it ended.

    A program that exceeds a limit is ended: of seconds, `output_bytes`, and unless they are 0
    `memory_bytes`, `processes` and `threads`. If `with_errors`, the program's stderr is part of its
    output; else it goes to this process's stderr.
    """
    process = await asyncio.create_subprocess_exec(
        *own_program("slipstream.core.machine.keeper"),
        "--memory-bytes",
        str(limits.memory_bytes),
        "--memory-setting",
        "memory_gib",
        "--processes",
        str(limits.processes),
        "--processes-setting",
        "max_processes",
        "--threads",
        str(limits.threads),
        "--threads-setting",
        "those of max_processes",
        "--cause-fd",
        "1",
        "--",
        *command,
        cwd=folder,
        env=dict(variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if with_errors else None,
        start_new_session=True,
    )
    assert process.stdout is not None
    output_tail = bytearray()
    bytes_left = limits.output_bytes
    limit = ""
    try:
        async with asyncio.timeout(limits.seconds):
            while not limit and (chunk := await process.stdout.read(_CHUNK_BYTES)):
                bytes_left -= len(chunk)
                output_tail += chunk
                del output_tail[:-KEPT_BYTES]
                limit = f"it wrote more than {limits.output_bytes} bytes" if bytes_left < 0 else ""
            if not limit:
                await process.wait()
    except TimeoutError:
        limit = f"it did not end within {limits.seconds:g} s"
    finally:
        await asyncio.shield(_end(process, process.stdout))
    assert process.returncode is not None
    text = output_tail.decode(errors="replace")
    if not limit and process.returncode == -signal.SIGKILL:
        # The keeper wrote the cause into the output.
        limit = ProgramEnd(0, text).last_line or "it was killed"
    return ProgramEnd(process.returncode, text, limit)


def own_program(module: str) -> list[str]:
    """Returns a command that runs `main` of our `module`; the caller appends its arguments.

    Modules are imported from this process's `sys.path`, whatever folder and variables contain.
    """
    begin = f"{_OWN_PATH}from {module} import main; main(sys.argv[1:])"
    path = json.dumps([os.path.abspath(entry) for entry in sys.path if entry])
    return [sys.executable, "-I", "-c", begin, path]


async def _end(process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
    """Ends the program, if it still runs, and all processes below it."""
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            # A program that is still writing can end only when its output is read.
            while await output.read(_CHUNK_BYTES):
                pass
            await process.wait()
    except TimeoutError:
        send_signal(process, signal.SIGKILL)
        await process.wait()
