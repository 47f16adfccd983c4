"""The input and the result of a task sampler: past results by task, and weights of the next draws.

    def weights(results: TaskResults, *, ...) -> FloatArray

A sampler is a pure function. The keyword-only parameters are arguments from the configuration,
checked by their annotations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.learner.algorithms.functions import (
    checked_arguments,
    describe_error,
    imported_function,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TaskResults:
    """The results of all tasks of one environment; arrays are [tasks] and read-only.

    Rewards are the environment's, before `algorithm.reward` changes them. Groups that
    `algorithm.filter` left out count, evaluations do not.
    """

    environment: str
    # The step whose batch is formed next, from 0.
    step: int
    # Number of groups that finished.
    groups: IntArray
    # Number of groups that were set aside: they failed for good, or their prompt is too long.
    failures: IntArray
    # Mean over the groups of their mean rewards; NaN before the first group.
    reward_mean: FloatArray
    # Mean reward of the newest group; NaN before the first.
    last_reward: FloatArray
    # Part of all episodes with at least the passing reward; NaN before the first group.
    pass_fraction: FloatArray
    # Steps since a group of the task was last begun; -1 if none was.
    steps_since_drawn: IntArray

    @property
    def num_tasks(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class TaskSampler:
    """A sampler of one's own, whose configured arguments are already bound to `call`."""

    # "module:function".
    name: str
    call: Callable[[TaskResults], Any]

    @classmethod
    def load(cls, name: str, arguments: Mapping[str, Any], *, setting: str) -> "TaskSampler":
        """Imports a sampler; raises ConfigError, which names `setting`, if it cannot be used."""
        call = imported_function(f"{setting}.function {name}", name)
        try:
            checked = checked_arguments(call, arguments, what=f"task sampler {name}")
        except ValueError as error:
            raise ConfigError(f"{setting}.args: {error}") from error
        return cls(name, partial(call, **checked))

    def weights(self, results: TaskResults) -> FloatArray:
        """Returns the weight of each task, [tasks].

        Raises RunFailed if the function raises, or returns anything but finite weights of at least
        0, one a task, that are not all 0.
        """
        for result in fields(results):
            column = getattr(results, result.name)
            if isinstance(column, np.ndarray):
                column.flags.writeable = False
        try:
            weights = np.array(self.call(results), dtype=np.float64)
        except (Exception, SystemExit) as error:
            raise self._fault(results, describe_error(error)) from error
        if weights.shape != (results.num_tasks,):
            raise self._fault(
                results,
                f"weights of shape {weights.shape} for {results.num_tasks} tasks: there must be "
                "one for each",
            )
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise self._fault(
                results,
                f"the weight of task {wrong[0]} is {weights[wrong[0]]:g}: a weight must be finite "
                "and at least 0",
            )
        with np.errstate(over="ignore"):
            total = float(weights.sum())
        if total == 0:
            raise self._fault(
                results, f"all {results.num_tasks} weights are 0: some task must be drawn"
            )
        if not np.isfinite(total):
            raise self._fault(results, "the sum of the weights is not finite: they must be smaller")
        return weights

    def _fault(self, results: TaskResults, what: str) -> RunFailed:
        return RunFailed(
            f"task sampler {self.name} of environment {results.environment} at step "
            f"{results.step + 1}: {what}"
        )
