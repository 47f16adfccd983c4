"""The times of a step's stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Stages that are reported for every step, even if they took no time.
ALWAYS = ("waiting", "forward", "export", "publish", "checkpoint")


class StageTimes:
    """Seconds of each stage on this rank since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ALWAYS, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block, which on a GPU ends when the GPU's work is done."""
        started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - started

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage by the names `STAGE_s`, and starts again at 0."""
        taken = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        return taken
