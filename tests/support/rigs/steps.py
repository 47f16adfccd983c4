"""Waits for the steps of a run, by the rows that it writes."""

import asyncio
from pathlib import Path

from support.rigs.run_processes import Command, rows_of

LIMIT_S = 600.0


def newest_step(folder: Path) -> int:
    try:
        return max((row.get("step", 0) for row in rows_of(folder / "run")), default=0)
    except (OSError, ValueError):
        # Not written yet, or not to the end of a line.
        return 0


async def until_row(folder: Path, run: Command, step: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while newest_step(folder) < step:
            assert run.process.returncode is None, run.out + run.err
            await asyncio.sleep(0.05)
