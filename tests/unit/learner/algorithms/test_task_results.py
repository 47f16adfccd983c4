"""Functions that weigh tasks: their refusals, and the curricula of deploy/algorithms."""

import math

import numpy as np
import pytest
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.learner.algorithms.task_results import TaskResults, TaskSampler
from slipstream.learner.controller.records.task_table import TaskTable

from deploy.algorithms import task_weights


def results_of(*tasks: tuple[int, int, int]) -> TaskResults:
    """Results at step 30; each task has finished groups of 4, passed episodes, the last draw."""
    table = TaskTable(len(tasks))
    for task, (groups, passed, drawn_at) in enumerate(tasks):
        if drawn_at >= 0:
            table.drawn(task, drawn_at)
        num_passed = passed
        for _ in range(groups):
            passed_here = min(4, num_passed)
            num_passed -= passed_here
            table.finished(task, passed_here / 4, 4, passed_here)
    return table.results("sums", table.pending, 30)


def weighed(result: object) -> np.ndarray:
    sampler = TaskSampler("mine:weights", lambda _: result)
    results = results_of(
        (0, 0, -1),
        (1, 2, 3),
    )
    return sampler.weights(results)


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ([1.0], "weights of shape (1,) for 2 tasks: there must be one for each"),
        (
            [[1.0, 2.0]],
            "weights of shape (1, 2) for 2 tasks: there must be one for each",
        ),
        (
            [1.0, math.nan],
            "the weight of task 1 is nan: a weight must be finite and at least 0",
        ),
        (
            [math.inf, 1],
            "the weight of task 0 is inf: a weight must be finite and at least 0",
        ),
        (
            [0.5, -1e-9],
            "the weight of task 1 is -1e-09: a weight must be finite and at least 0",
        ),
        ([0, 0], "all 2 weights are 0: some task must be drawn"),
        ([1e308, 1e308], "the sum of the weights is not finite: they must be smaller"),
        (None, "weights of shape () for 2 tasks: there must be one for each"),
        ({1: 2}, "TypeError: float() argument must be"),
        (["a", "b"], "ValueError: could not convert string to float: 'a'"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused_with_value_and_rule(weights, rule):
    with pytest.raises(RunFailed) as refused:
        weighed(weights)
    line = "task sampler mine:weights of environment sums at step 31: "
    assert str(refused.value).startswith(line + rule)


def test_an_error_of_a_function_names_it_and_the_line():
    def weights(results: TaskResults) -> object:
        return results.groups[99]

    with pytest.raises(RunFailed, match=r"IndexError: .* \(test_task_results.py:\d+\)"):
        TaskSampler("mine:weights", weights).weights(results_of((0, 0, -1)))


def test_a_function_cannot_change_what_it_sees():
    def weights(results: TaskResults) -> object:
        results.groups[0] = 5
        return results.groups

    with pytest.raises(RunFailed, match="read-only"):
        TaskSampler("mine:weights", weights).weights(results_of((1, 1, 1)))


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("deploy.algorithms.nowhere:f", {}, "import of deploy.algorithms.nowhere in "),
        (
            "deploy.algorithms.task_weights:f",
            {},
            "deploy.algorithms.task_weights has no function f",
        ),
        (
            "deploy.algorithms.task_weights:half_solved",
            {"flor": 1},
            "has no argument 'flor'; known: floor",
        ),
        (
            "deploy.algorithms.task_weights:half_solved",
            {"floor": 2},
            "floor of task sampler",
        ),
    ],
)
def test_a_function_that_cannot_be_loaded_names_its_setting(name, arguments, line):
    setting = "extensions.task_weights.environments.sums"
    with pytest.raises(ConfigError) as refused:
        TaskSampler.load(name, arguments, setting=setting)
    assert str(refused.value).startswith(setting)
    assert line in str(refused.value)


TASKS = (
    (0, 0, -1),
    (1, 0, 30),
    (1, 1, 20),
    (2, 4, 10),
    (2, 7, 0),
    (1, 4, 28),
    (3, 12, 25),
)


def test_half_solved_weighs_by_the_variance_of_a_pass():
    expected = [1.0, 0.05, 0.75, 1.0, 0.4375, 0.05, 0.05]
    results = results_of(*TASKS)
    lowest = task_weights.half_solved(results)
    assert lowest == pytest.approx(expected)
    highest = task_weights.half_solved(results, floor=0.8)
    expected = [max(weight, 0.8) for weight in expected]
    assert highest == pytest.approx(expected)


def test_hard_again_weighs_by_failures_and_time():
    expected = []
    for groups, passed, drawn_at in TASKS:
        if drawn_at < 0:
            expected.append(1.0)
            continue
        episodes = 4 * groups
        failed = (episodes - passed) / episodes
        waited = min((30 - drawn_at) / 20, 1.0)
        weight = max(failed * waited, 1e-3)
        expected.append(weight)
    results = results_of(*TASKS)
    weights = task_weights.hard_again(results)
    assert weights == pytest.approx(expected)


def test_unsolved_leaves_out_what_is_solved_until_all_is():
    results = results_of(*TASKS)
    weights = task_weights.unsolved(results)
    assert weights.tolist() == [1] * 6 + [0]
    weights = task_weights.unsolved(results, groups=1)
    assert weights.tolist() == [1] * 5 + [0] * 2
    results = results_of(
        (2, 8, 1),
        (3, 12, 2),
    )
    weights = task_weights.unsolved(results)
    assert weights.tolist() == [1, 1]
