"""The results by task: sums beside plain loops, one result a group, the same after a restart."""

import random
import statistics
from dataclasses import fields

import numpy as np
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import GroupId
from slipstream.learner.algorithms.task_results import TaskResults
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.snapshots import (
    decode_history,
    encode_history,
)
from slipstream.learner.controller.records.task_table import TaskTable

NUM_TASKS = 5


def lease(number: int, task: int) -> kinds.GroupLease:
    return kinds.GroupLease(
        group=GroupId(f"g{number:06d}"),
        environment="e",
        number=number,
        task=task,
        seed=1,
        deadline=9,
        server="a",
        epoch=1,
        members=[0, 1],
    )


def weights(
    events: int, step: int = 0, num_tasks: int = NUM_TASKS
) -> kinds.TaskWeights:
    return kinds.TaskWeights(
        environment="e",
        num_tasks=num_tasks,
        events=events,
        step=step,
    )


def result(number: int, reward: float, passed: int) -> kinds.TaskResult:
    return kinds.TaskResult(
        group=GroupId(f"g{number:06d}"),
        reward=reward,
        episodes=2,
        passed=passed,
    )


def history_of(*records: kinds.Record) -> RunHistory:
    history = RunHistory()
    for record in records:
        history.apply(record)
    return history


def columns(results: TaskResults) -> dict[str, list[float]]:
    lists = {}
    for field in fields(TaskResults):
        value = getattr(results, field.name)
        if isinstance(value, np.ndarray):
            lists[field.name] = value.tolist()
    return lists


def same(one: TaskResults, other: dict[str, list[float]]) -> None:
    for name, values in columns(one).items():
        assert values == pytest.approx(other[name], nan_ok=True), name


class PlainTask:
    """The results of one task, in lists."""

    def __init__(self) -> None:
        self.failures = 0
        self.means: list[float] = []
        self.rewards: list[float] = []
        self.drawn_at: int | None = None

    def row(self, step: int) -> dict[str, float]:
        row = dict.fromkeys(("reward_mean", "last_reward", "pass_fraction"), np.nan)
        if self.means:
            row["reward_mean"] = statistics.fmean(self.means)
            row["last_reward"] = self.means[-1]
            row["pass_fraction"] = self.rewards.count(1.0) / len(self.rewards)
        row["groups"] = len(self.means)
        row["failures"] = self.failures
        row["steps_since_drawn"] = -1
        if self.drawn_at is not None:
            row["steps_since_drawn"] = step - self.drawn_at
        return row


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_are_those_of_all_events_up_to_a_record(seed: int) -> None:
    rnd = random.Random(seed)
    table = TaskTable(NUM_TASKS)
    plain = [PlainTask() for _ in range(NUM_TASKS)]
    for step in range(60):
        task = rnd.randrange(NUM_TASKS)
        kind = rnd.choice(("drawn", "finished", "failed", "take"))
        if kind == "drawn":
            table.drawn(task, step)
            plain[task].drawn_at = step
        elif kind == "failed":
            table.failed(task)
            plain[task].failures += 1
        elif kind == "take":
            num_pending = len(table.pending)
            table.take(rnd.randint(0, num_pending))
        else:
            rewards = rnd.choices((0.0, 0.5, 1.0), k=3)
            mean = statistics.fmean(rewards)
            table.finished(task, mean, 3, rewards.count(1.0))
            plain[task].means.append(mean)
            plain[task].rewards += rewards
    expected: dict[str, list[float]] = {}
    for plain_task in plain:
        for name, value in plain_task.row(100).items():
            expected.setdefault(name, []).append(value)
    before = table.stored()
    results = table.results("e", table.pending, 100)
    same(results, expected)
    assert table.stored() == before
    again = TaskTable.restored(before)
    assert again == table
    again.take(len(again.pending))
    results = again.results("e", [], 100)
    same(results, expected)


def test_a_group_has_one_result_however_often_it_completes() -> None:
    history = history_of(
        weights(0),
        lease(0, 3),
        result(0, 0.5, 1),
        result(0, 1.0, 2),
    )
    table = history.task_tables["e"]
    assert [event[0] for event in table.pending] == ["drawn", "finished"]
    again = decode_history(encode_history(history))
    again.apply(result(0, 1.0, 2))
    assert again.task_tables == history.task_tables
    results = table.results("e", table.pending, 0)
    assert results.last_reward[3] == 0.5


def test_groups_that_are_set_aside_are_failures() -> None:
    set_aside = kinds.GroupSetAside(group=GroupId("g000000"))
    history = history_of(
        weights(0),
        lease(0, 3),
        set_aside,
    )
    table = history.task_tables["e"]
    results = table.results("e", table.pending, 0)
    assert results.failures.tolist() == [0, 0, 0, 1, 0]


def test_environments_without_weights_have_no_table() -> None:
    assert history_of(lease(0, 3), result(0, 0.5, 1)).task_tables == {}


@pytest.mark.parametrize(
    "change",
    [
        kinds.Tasks(environment="e", num_tasks=NUM_TASKS, digest="other"),
        kinds.Submitted(environment="e", spec="{}"),
    ],
)
def test_other_tasks_have_no_results(change: kinds.Record) -> None:
    tasks = kinds.Tasks(environment="e", num_tasks=NUM_TASKS, digest="first")
    history = history_of(
        tasks,
        weights(0),
        lease(0, 3),
        change,
    )
    assert history.task_tables == {}
    history.apply(weights(0, num_tasks=3))
    assert history.task_tables["e"].num_tasks == 3
    # A group of the tasks before ends.
    history.apply(result(0, 1.0, 2))
    assert history.task_tables["e"].pending == []


def test_a_journal_that_weighs_more_than_it_has_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match="weighs 2 results of tasks of e, and has 1"
    ):
        history_of(weights(0), lease(0, 1), weights(2))
