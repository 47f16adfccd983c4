"""Compares two answers as mathematics in another process, so that a hard one delays no other.

Waits for: the other process. Unblocked by: its answer, or the limit, at which it is killed; the
next comparison then starts another one. One comparison runs at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

PROGRAM = "slipstream.environments.math_program"
# Seconds for importing sympy on a busy machine.
START_LIMIT_S = 60.0
# Characters at the end of a reply that are read: parsing takes long, and the answer comes last.
MAX_CHARACTERS = 4000
LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class MathVerdict:
    """The result of a comparison.

    `readable`: an expression was found in the reply. `timed_out`: the comparison was abandoned.
    """

    right: bool
    readable: bool
    timed_out: bool = False


class MathJudge:
    """Runs math-verify behind a pipe; the first comparison starts the process."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` is the limit of one comparison."""
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def compare(self, answer: str, reply: str) -> MathVerdict:
        """Whether `reply` gives `answer`; ValueError when `answer` is no mathematics."""
        async with self._lock:
            process = await self._started()
            request = {"answer": answer, "reply": reply[-MAX_CHARACTERS:]}
            try:
                async with asyncio.timeout(self._timeout_s):
                    said = await _ask(process, request)
            except TimeoutError:
                await self._kill()
                return MathVerdict(right=False, readable=False, timed_out=True)
            except asyncio.CancelledError:
                # The late answer would be taken for that of the next comparison.
                await asyncio.shield(self._kill())
                raise
            if said is None:
                # The process has ended: most likely it ran out of memory.
                await self._kill()
                return MathVerdict(right=False, readable=False)
        if not said["known"]:
            raise ValueError(f"the right answer {answer!r} cannot be read as mathematics")
        return MathVerdict(right=said["right"], readable=said["readable"])

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
            )
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    # This first comparison pays for what the packages compile lazily.
                    await _ask(self._process, {"answer": "1", "reply": "1"})
            except (TimeoutError, asyncio.CancelledError):
                await asyncio.shield(self._kill())
                raise
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _ask(
    process: asyncio.subprocess.Process, request: dict[str, str]
) -> dict[str, bool] | None:
    """Returns the process's answer; None when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return None
    line = await process.stdout.readline()
    if not line:
        return None
    said: dict[str, bool] = json.loads(line)
    return said
