"""A line of training that takes turns with another on one policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from slipstream.learner.trainer.batches.batch import Contents
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.training_line import TrainingLine
from slipstream.learner.trainer.weight_changes import (
    WeightChange,
    host_weights,
)


@dataclass(frozen=True)
class BranchStep:
    """One step of a branch: its metrics, and the published weights before and after it."""

    metrics: Mapping[str, float]
    change: WeightChange


class TrainingBranch:
    """A training line with its own state of the policy; every method is collective.

    `weights` are the published ones of its newest version, as `host_weights` returns them.
    """

    def __init__(self, policy: Policy, line: TrainingLine) -> None:
        """Begins with the state that the policy holds now."""
        self._policy = policy
        self._line = line
        self._state = line.hold()
        self.weights = host_weights(policy)

    def fork(self, line: TrainingLine) -> Self:
        """Returns a branch of another line of the policy that begins with this one's state."""
        line.restore(self._state)
        return type(self)(self._policy, line)

    def train(self, contents: Contents) -> BranchStep:
        """Trains a recorded batch; afterwards the policy holds this branch's new state.

        Raises like `TrainingLine.train`.
        """
        self._line.restore(self._state)
        result = self._line.train(contents)
        before = self.weights
        self.weights = host_weights(self._policy)
        self._state = self._line.hold()
        change = WeightChange(before, self.weights)
        return BranchStep(result.metrics, change)
