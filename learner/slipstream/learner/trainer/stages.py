"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Told of every step, also where they took no time.
ALWAYS = ("waiting", "forward", "export", "publish", "checkpoint")


class StageTimes:
    """Seconds of each stage since they were taken last; of this rank."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ALWAYS, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block; on a GPU until its work is done."""
        started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - started

    def take(self) -> dict[str, float]:
        """The seconds of each stage as `STAGE_s`; all begin at 0 again."""
        taken = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        return taken
