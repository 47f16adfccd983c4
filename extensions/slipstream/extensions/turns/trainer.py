"""Locks the GPUs of a rank while its steps use memory that sleeping engines free."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from slipstream.core.machine.gpus import fill_gpus
from slipstream.core.run_folder import LOCKS
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart


class LockedSteps(StepPart):
    """Locks GPUs for each step, with `controller.turns = "sleep"`.

    A rollout server that starts on these GPUs measures their free memory, so it must not start
    during a step.
    """

    def __init__(self, config: Config, gpus: Sequence[str]) -> None:
        self._locks = config.run_dir / LOCKS
        self._gpus = gpus
        self._limit_s = config.rollout_server.start_timeout_s

    def around(self, step: int) -> AbstractContextManager[None]:
        """Waits for the locks at most `rollout_server.start_timeout_s`, then raises RunFailed."""
        return fill_gpus(
            self._locks,
            self._gpus,
            alone=False,
            limit_s=self._limit_s,
        )


def step_part(config: Config, policy: Policy) -> LockedSteps | None:
    """Returns the part that locks GPUs; None where engines keep their memory."""
    if config.controller.turns != "sleep":
        return None
    return LockedSteps(config, policy.ranks.gpus)
