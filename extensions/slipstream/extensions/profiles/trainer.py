"""The window of steps in which torch's profiler runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import ProfileSection
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart
from torch.profiler import profile

logger = logging.getLogger(__name__)


class ProfileWindow(StepPart):
    """Runs torch's profiler over the steps that `section` selects."""

    def __init__(self, section: ProfileSection, folder: Path, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._window = range(0)
        if section.start_step is not None:
            self._window = range(section.start_step, section.start_step + section.num_steps)
        self._profiler: profile | None = None
        self._steps: list[int] = []

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profiles the block as step `step` (from 1); writes the trace after the last step."""
        if step in self._window:
            if self._profiler is None:
                self._profiler = profile()
                self._profiler.start()
            self._steps.append(step)
        yield
        if step + 1 >= self._window.stop:
            self.close()

    def close(self) -> None:
        """Stops the profiler and writes its trace; does nothing if it is not running."""
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        first = self._steps[0]
        last = self._steps[-1]
        path = self._folder / f"rank-{self._rank}-steps-{first}-{last}.json"
        profiler.export_chrome_trace(str(path))
        logger.info("the profile of steps %d to %d is %s", first, last, path)


def step_part(config: Config, policy: Policy) -> ProfileWindow:
    """Returns the part that records a window of steps, in the folder `profile` of the run."""
    folder = config.run_dir / "profile"
    return ProfileWindow(config.debug.profile, folder, rank=policy.ranks.rank)
