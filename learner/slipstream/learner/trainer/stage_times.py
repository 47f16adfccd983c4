"""Timers of the stages of a trainer rank."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Stages that are reported for every step, even if they took no time.
ALWAYS = ("waiting", "forward", "export", "publish", "checkpoint")


class StageTimes:
    """Timers of this rank's training stages: seconds since the last `take`, and since the start."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        # Stages of the whole start, and when each of those under way began; both under the lock.
        self._totals = dict.fromkeys(ALWAYS, 0.0)
        self._begun: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage; on a GPU it waits for the GPU's work to end."""
        with self._lock:
            self._begun[stage] = started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            passed = time.monotonic() - started
            self._seconds[stage] = self._seconds.get(stage, 0.0) + passed
            with self._lock:
                del self._begun[stage]
                self._totals[stage] = self._totals.get(stage, 0.0) + passed

    def totals(self) -> dict[str, float]:
        """Returns the seconds of each stage since the start, by its name; works on any thread.

        The current stage counts up to now.
        """
        with self._lock:
            now = time.monotonic()
            begun = {stage: now - started for stage, started in self._begun.items()}
            return {
                stage: self._totals.get(stage, 0.0) + begun.get(stage, 0.0)
                for stage in self._totals.keys() | begun.keys()
            }

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage under the name `STAGE_s`, and resets them to 0."""
        taken = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(ALWAYS, 0.0)
        return taken
