"""Functions that weigh tasks by their results: three curricula."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from slipstream.learner.algorithms.task_results import FloatArray, TaskResults

Share = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[int, Field(ge=1)]
Least = Annotated[float, Field(gt=0)]


def half_solved(results: TaskResults, *, floor: Share = 0.05) -> FloatArray:
    """Prefers tasks of which about half of the episodes pass.

    The weight is the variance of a pass, p (1 - p), times 4, and at least `floor`; that of a task
    without a result is 1. A group teaches most where its rewards differ most.
    """
    passed = results.pass_fraction
    is_new = np.isnan(passed)
    variance = 4 * passed * (1 - passed)
    shares = np.where(is_new, 1.0, variance)
    weights: FloatArray = np.maximum(shares, floor)
    return weights


def hard_again(results: TaskResults, *, after_steps: Least = 20.0) -> FloatArray:
    """Draws a task again the sooner, the less of it is solved.

    The weight rises with the part of the episodes that failed and with the steps since the last
    draw, up to `after_steps`; that of a task that was never drawn is 1, the highest one.
    """
    failed = 1 - np.nan_to_num(results.pass_fraction, nan=0.0)
    age = results.steps_since_drawn / after_steps
    waited = np.minimum(age, 1.0)
    is_new = results.steps_since_drawn < 0
    urgency = np.maximum(failed * waited, 1e-3)
    return np.where(is_new, 1.0, urgency)


def unsolved(
    results: TaskResults,
    *,
    solved: Share = 1.0,
    groups: Number = 2,
) -> FloatArray:
    """Draws no task again that is solved: all tasks alike, until none is left.

    A task is solved once `groups` of its groups have finished and at least the part `solved` of all
    their episodes has passed. Once each is solved, all have the same weight.
    """
    passed = np.nan_to_num(results.pass_fraction)
    is_tried = results.groups >= groups
    is_solved = is_tried & (passed >= solved)
    if is_solved.all():
        return np.ones(results.num_tasks)
    return np.where(is_solved, 0.0, 1.0)
