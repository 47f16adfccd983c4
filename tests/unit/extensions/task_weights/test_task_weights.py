"""Weights are made from the journal's results, beside the event loop, and the same ones again."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.group_sizes import GroupSizes
from slipstream.core.types import GroupId, ServerId
from slipstream.extensions.task_weights import controller
from slipstream.extensions.task_weights.controller import TaskWeighing
from slipstream.extensions.task_weights.functions_check import (
    check_sampler,
    check_task_weights,
)
from slipstream.learner.algorithms.task_results import TaskResults, TaskSampler
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.v1 import environment_pb2, trajectory_pb2
from support.fakes.small_configs import small_config
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S

KEY = ServerKey(ServerId("a"), 1)
UNSOLVED = "deploy.algorithms.task_weights:unsolved"


def table_of(
    function: str = UNSOLVED, name: str = "e", **entry: object
) -> dict[str, Any]:
    return {"task_weights": {"environments": {name: {"function": function, **entry}}}}


def no_tasks(results: TaskResults) -> object:
    """All weights are 0 once a task has a result."""
    return np.where(results.groups.sum() > 0, 0.0, np.ones(results.num_tasks))


def first_only(results: TaskResults) -> object:
    return np.arange(results.num_tasks) == 0


def other_each_time(results: TaskResults) -> object:
    return np.random.default_rng().random(results.num_tasks)


class Journal:
    def __init__(self, state: RunHistory) -> None:
        self.state = state
        self.records: list[kinds.Record] = []

    def append(self, record: kinds.Record) -> None:
        self.state.apply(record)
        self.records.append(record)


class Scene:
    """A controller's part with one environment, after the records of earlier starts."""

    def __init__(
        self, *earlier: kinds.Record, num_tasks: int = 4, function: str = UNSOLVED
    ):
        self.run = run_of(
            environments=[{"name": "e", "reference": "ours:Sums"}],
            extensions=table_of(function),
        )
        self.state = RunHistory()
        for record in earlier:
            self.state.apply(record)
        self.journal = Journal(self.state)
        self.books = books_of(self.run, journal=self.journal, state=self.state)
        self.suspended: list[str] = []
        intake = SimpleNamespace(
            suspend=lambda name, cause: self.suspended.append(cause)
        )
        kernel: Any = SimpleNamespace(run=self.run, books=self.books, intake=intake)
        self.part = TaskWeighing(kernel)
        purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
        spec = environment_pb2.EnvironmentSpec(name="e", weight=1.0, purpose=purpose)
        self.entry = self.books.environments.add(spec)
        self.entry.loaded(KEY, num_tasks)

    @property
    def weights(self) -> list[float]:
        cumulative = self.books.environments.drawn["e"].cumulative
        assert cumulative is not None
        return np.diff(cumulative, prepend=0).tolist()

    async def weigh(self) -> None:
        await self.part._weigh("e")

    def play(self, number: int, task: int, passed: int) -> None:
        """Leases, finishes and trains one group of a task."""
        group = GroupId(f"g{number:06d}")
        self.journal.append(kinds.GroupLease(group, "e", number, task, 1, 9, "a", 1))
        result = kinds.TaskResult(
            group=group,
            reward=passed / 2,
            episodes=2,
            passed=passed,
        )
        self.journal.append(result)
        batch = kinds.StepBatch(
            step=self.state.next_step,
            batch_id=f"b{number:06d}",
            crc32=1,
            groups=[group],
            trajectories=2,
            tokens=[],
        )
        self.journal.append(batch)

    def draws(self, count: int) -> list[int]:
        environments = self.books.environments
        tasks = []
        for number in range(count):
            self.entry.counts.next_number = number
            tasks.append(environments.next_task(self.entry)[0])
        return tasks


async def test_no_group_is_leased_before_the_first_weights() -> None:
    scene = Scene()
    assert scene.books.environments.next_for(KEY, {}, GroupSizes(2)) is None
    await scene.weigh()
    assert scene.books.environments.next_for(KEY, {}, GroupSizes(2)) is scene.entry
    assert scene.weights == [1, 1, 1, 1]


async def test_solved_tasks_are_not_drawn_again_from_the_next_step_on() -> None:
    scene = Scene()
    await scene.weigh()
    for number, (task, passed) in enumerate([(1, 2), (2, 1), (1, 2)]):
        scene.play(number, task, passed)
        await scene.weigh()
    assert scene.weights == [1, 0, 1, 1]
    draws = scene.draws(400)
    assert set(draws) == {0, 2, 3}
    assert min(draws.count(task) for task in (0, 2, 3)) > 100


async def test_a_controller_that_starts_again_draws_the_same_tasks() -> None:
    scene = Scene()
    await scene.weigh()
    for number, passed in enumerate((2, 2, 1)):
        scene.play(number, number % 2, passed)
        await scene.weigh()
    # Results behind the newest weights are not in them, here and after a restart.
    scene.play(3, 2, 2)
    scene.play(4, 2, 2)
    again = Scene(*scene.journal.records)
    await again.weigh()
    assert again.journal.records == []
    assert again.weights == scene.weights
    assert again.draws(50) == scene.draws(50)
    for part in (scene, again):
        await part.weigh()
    assert again.weights == scene.weights == [1, 1, 0, 1]
    assert again.journal.records == scene.journal.records[-1:]


async def test_weights_in_the_making_do_not_change_what_leases_do_meanwhile() -> None:
    scene = Scene()
    await scene.weigh()
    scene.play(0, 3, 2)
    scene.play(1, 3, 2)
    weighing = asyncio.create_task(scene.weigh())
    await asyncio.sleep(0)
    # This group ends while the weights are computed: it counts for the ones after them.
    scene.play(2, 0, 2)
    assert scene.weights == [1, 1, 1, 1]
    await weighing
    assert scene.weights == [1, 1, 1, 0]
    table = scene.state.task_tables["e"]
    assert [event[0] for event in table.pending] == ["drawn", "finished"]


async def test_other_tasks_begin_without_results() -> None:
    scene = Scene()
    await scene.weigh()
    scene.play(0, 1, 2)
    scene.play(1, 1, 2)
    await scene.weigh()
    assert scene.weights == [1, 0, 1, 1]
    scene.entry.num_tasks = 6
    await scene.weigh()
    assert scene.weights == [1] * 6


async def test_a_faulty_function_ends_the_run_with_a_line() -> None:
    scene = Scene(function=f"{__name__}:no_tasks")
    await scene.weigh()
    scene.play(0, 1, 2)
    with pytest.raises(
        RunFailed, match="at step 2: all 4 weights are 0: some task must be drawn"
    ):
        await scene.weigh()


async def test_a_function_that_does_not_return_ends_the_run_with_a_line(
    monkeypatch,
) -> None:
    scene = Scene()
    released = threading.Event()
    stuck = TaskSampler("mine:stuck", lambda _: released.wait(LIMIT_S))
    monkeypatch.setitem(scene.part._samplers, "e", stuck)
    monkeypatch.setattr(controller, "WEIGHING_LIMIT_S", 0.05)
    with pytest.raises(
        RunFailed, match="mine:stuck of environment e gave no weights within 0.05 s"
    ):
        await scene.weigh()
    released.set()


@pytest.mark.parametrize(
    ("num_tasks", "cause"),
    [
        (
            0,
            "extensions.task_weights.environments.e needs a number of tasks, and tasks() has no",
        ),
        (
            2_000_000,
            "extensions.task_weights.environments.e is for at most 1,000,000 tasks, got",
        ),
    ],
)
async def test_an_environment_whose_tasks_cannot_be_weighed_is_suspended(
    num_tasks, cause
) -> None:
    scene = Scene(num_tasks=num_tasks)
    await scene.weigh()
    (told,) = scene.suspended
    assert told.startswith(cause)


async def test_the_loop_goes_on_while_a_function_weighs() -> None:
    loop_has_run = threading.Event()

    def waiting(results: TaskResults) -> object:
        assert loop_has_run.wait(LIMIT_S)
        return np.ones(results.num_tasks)

    scene = Scene()
    scene.part._samplers["e"] = TaskSampler("mine:waiting", waiting)
    weighing = asyncio.create_task(scene.weigh())
    await asyncio.sleep(0)
    loop_has_run.set()
    await weighing
    assert scene.weights == [1, 1, 1, 1]


def test_an_environment_that_is_not_there_yet_is_told() -> None:
    run = run_of(
        environments=[{"name": "e", "reference": "ours:Sums"}],
        extensions=table_of(name="served"),
    )
    books = books_of(run, journal=Journal(RunHistory()))
    kernel: Any = SimpleNamespace(run=run, books=books, intake=None)
    TaskWeighing(kernel)
    (event,) = run.events.kept()
    assert event.text == (
        "extensions.task_weights.environments.served waits for a client that serves or submits "
        "environment served: the settings have none of that name"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"extensions": table_of(name="v")},
            "extensions.task_weights.environments.v must be an environment that is trained, got an "
            "evaluation: its tasks are always the first ones",
        ),
        (
            {
                "controller": {"client_loop": True},
                "environments": [],
                "evaluations": [],
            },
            "extensions.task_weights needs controller.client_loop = false: a client that decides "
            "what is sampled has no tasks, got true",
        ),
        (
            {"extensions": {"task_weights": {"environments": {}}}},
            "extensions.task_weights.environments: Dictionary should have at least 1 item",
        ),
        (
            {"extensions": table_of("half_solved")},
            "a reference is package.module:Class, got 'half_solved'",
        ),
        (
            {"extensions": table_of(weight=1)},
            "extensions.task_weights.environments.e.weight: Extra inputs are not permitted",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, line) -> None:
    table = {
        "environments": [{"name": "e", "reference": "m:E"}],
        "evaluations": [{"name": "v", "reference": "m:V"}],
        "extensions": table_of(),
    }
    with pytest.raises(ConfigError) as refused:
        small_config(**table | changes)
    assert line in str(refused.value)


def test_the_source_of_a_function_is_recorded_for_a_resume() -> None:
    config = small_config(
        environments=[{"name": "e", "reference": "m:E"}],
        extensions=table_of(),
    )
    assert config.own_functions == [UNSOLVED]


@pytest.mark.parametrize("name", ["half_solved", "hard_again", "unsolved"])
def test_the_curricula_pass_the_check(name, capsys) -> None:
    settings = small_config(
        environments=[{"name": "e", "reference": "m:E"}],
        extensions=table_of(f"deploy.algorithms.task_weights:{name}"),
    )
    check_task_weights(settings)
    assert (
        f"deploy.algorithms.task_weights:{name} weighs 100,000 tasks in "
        in capsys.readouterr().out
    )


def test_the_check_refuses_what_a_run_would_meet() -> None:
    check_sampler("e", TaskSampler("mine:first_only", first_only))
    with pytest.raises(
        ConfigError, match="of environment e at step 4: all 7 weights are 0"
    ):
        check_sampler("e", TaskSampler("mine:no_tasks", no_tasks))
    with pytest.raises(
        ConfigError, match="with the same results: it must be a pure function"
    ):
        check_sampler("e", TaskSampler("mine:other", other_each_time))
