"""A function that weighs the tasks of simulated runs."""

import numpy as np
from slipstream.learner.algorithms.task_results import FloatArray, TaskResults


def least_drawn(results: TaskResults) -> FloatArray:
    """Prefers tasks with few results, and those whose last draw is long ago."""
    waited = np.where(results.steps_since_drawn < 0, 9, results.steps_since_drawn)
    weights: FloatArray = (1.0 + waited) / (1 + results.groups + results.failures)
    return weights
