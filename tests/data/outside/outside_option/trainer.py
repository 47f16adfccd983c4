"""A part of the trainer's steps that counts what was trained."""

from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart

from outside_option.settings import CountedSection, OutsideSection


class CountedSteps(StepPart):
    """Reports the number of trajectories of all steps so far, times `factor`."""

    def __init__(self, config: Config, _: Policy) -> None:
        self._factor = config.table_of("outside", OutsideSection).factor
        counted = config.top_table("counted", CountedSection)
        self._num_trajectories = 0 if counted is None else counted.earlier

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        self._num_trajectories += len(batch.trajectories)
        return {"outside_trajectories": self._factor * self._num_trajectories}
