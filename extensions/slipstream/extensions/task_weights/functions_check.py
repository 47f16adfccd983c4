"""Checks functions that weigh tasks.

The command is `python -m slipstream.extensions.task_weights.functions_check < FILE`.

FILE has the resolved settings of a run, in TOML. Each function gets the results of a start and of
later steps, drawn at random, of few and of many tasks.
"""

import sys
import time

import numpy as np
from slipstream.core.configuration.config_file import run_check
from slipstream.core.errors import FACT, ConfigError, RunFailed
from slipstream.core.settings.config import Config
from slipstream.extensions.task_weights.controller import load
from slipstream.extensions.task_weights.settings import section_of
from slipstream.learner.algorithms.task_results import FloatArray, TaskResults, TaskSampler

MANY_TASKS = 100_000
# Numbers of tasks, and steps that have trained; later ones keep a part of the tasks untried.
SCENES = (
    (1, 0),
    (7, 0),
    (1000, 0),
    (7, 3),
    (1000, 40),
    (MANY_TASKS, 0),
    (MANY_TASKS, 200),
)


def drawn_results(environment: str, num_tasks: int, step: int) -> TaskResults:
    """Returns results as a run could have them at `step`, always the same ones."""
    random = np.random.default_rng([num_tasks, step])
    untried = random.random(num_tasks) < 0.3
    untried[0] = True
    groups = random.integers(1, 6, num_tasks)
    groups[untried] = 0
    if step == 0:
        groups[:] = 0
    tried = groups > 0
    chance = random.random(num_tasks)
    pass_fraction = random.binomial(8, chance) / 8
    last_reward = random.binomial(8, pass_fraction) / 8
    failures = random.integers(0, 2, num_tasks)
    waited = random.integers(0, step + 1, num_tasks)
    return TaskResults(
        environment=environment,
        step=step,
        groups=groups,
        failures=np.where(tried, failures, 0),
        reward_mean=np.where(tried, pass_fraction, np.nan),
        last_reward=np.where(tried, last_reward, np.nan),
        pass_fraction=np.where(tried, pass_fraction, np.nan),
        steps_since_drawn=np.where(tried, waited, -1),
    )


def check_sampler(environment: str, sampler: TaskSampler) -> float:
    """Returns the seconds of the last call, for many tasks; raises ConfigError for a fault."""
    seconds = 0.0
    for num_tasks, step in SCENES:
        began_s = time.perf_counter()
        weights = _weighed(environment, sampler, num_tasks, step)
        seconds = time.perf_counter() - began_s
        again = _weighed(environment, sampler, num_tasks, step)
        differs = np.flatnonzero(weights != again)
        if len(differs):
            task = differs[0]
            first = weights[task]
            later = again[task]
            raise ConfigError(
                f"task sampler {sampler.name}: the weight of task {task} of {num_tasks} is "
                f"{first:g}, and {later:g} in a later call with the same results: "
                "it must be a pure function"
            )
    return seconds


def _weighed(
    environment: str,
    sampler: TaskSampler,
    num_tasks: int,
    step: int,
) -> FloatArray:
    results = drawn_results(environment, num_tasks, step)
    try:
        return sampler.weights(results)
    except RunFailed as error:
        raise ConfigError(str(error)) from error


def check_task_weights(config: Config) -> None:
    """Raises ConfigError for the first function that cannot work; tells its time for many tasks."""
    for name, section in section_of(config).environments.items():
        sampler = load(name, section)
        seconds = check_sampler(name, sampler)
        milliseconds = 1000 * seconds
        print(f"{FACT}{sampler.name} weighs {MANY_TASKS:,} tasks in {milliseconds:.3g} ms")


if __name__ == "__main__":
    sys.exit(run_check(check_task_weights))
