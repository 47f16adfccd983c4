"""The profiler: runs a window of steps under torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from slipstream.core.settings.config import ProfileSection
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class ProfileWindow:
    """Profiles the steps of `section` on the ranks of `section`; does nothing on other ranks."""

    def __init__(self, section: ProfileSection, folder: Path, *, rank: int) -> None:
        """Takes the `folder` for traces."""
        self._section = section
        self._folder = folder
        self._rank = rank
        self._profiler: profile | None = None
        self._steps: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds a step, counted from 1; writes the trace after the window's last step."""
        first = self._section.start_step
        if first is None or self._rank not in self._section.ranks:
            yield
            return
        last = first + self._section.num_steps - 1
        if first <= step <= last:
            self._start()
            self._steps.append(step)
        yield
        if step >= last:
            self.close()

    def close(self) -> None:
        """Writes the trace of a window that is still open."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}-steps-{self._steps[0]}-{self._steps[-1]}.json"
        profiler.export_chrome_trace(str(path))
        logger.info("the profile of steps %d to %d is %s", self._steps[0], self._steps[-1], path)

    def _start(self) -> None:
        if self._profiler is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            with_stack=self._section.with_stack,
            profile_memory=self._section.memory,
        )
        self._profiler.start()
