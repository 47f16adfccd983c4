"""The choice of tasks by their recent rewards."""

from collections import Counter

import pytest
from pydantic import JsonValue
from slipstream.core.settings.sections import CurriculumSection
from slipstream.core.types import GroupId, ServerId
from slipstream.learner.controller.records.history import WINDOW, TaskResults, read_history
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.tasks.curriculum import Curriculum
from slipstream.learner.controller.tasks.environments import EnvironmentBook
from slipstream.v1 import environment_pb2, trajectory_pb2

KEY = ServerKey(ServerId("a"), 1)


def book_with(num_tasks, history=None):
    curricula = {"e": (CurriculumSection(), 1.0)}
    book = EnvironmentBook(seed=1, max_failed_groups=2, curricula=curricula)
    if history is not None:
        book.restore(history)
    purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    entry = book.add(environment_pb2.EnvironmentSpec(name="e", weight=1.0, purpose=purpose))
    book.loaded("e", KEY, num_tasks)
    return book, entry


def note(book: EnvironmentBook, number: int, task_index: int, *rewards: float) -> None:
    for place, reward in enumerate(rewards):
        assert book.has_result(GroupId(f"g{number}-{task_index}-{place}"), "e", task_index, reward)


def test_tasks_are_drawn_in_proportion_to_the_variance_of_their_success() -> None:
    book, entry = book_with(num_tasks=4)
    note(book, 0, 0, 0.0, 1.0, 1.0)
    note(book, 0, 1, 1.0, 0.0, 0.0)
    note(book, 0, 2, 1.0, 0.0)
    note(book, 0, 3, 0.9, 0.9)
    drawn = Counter(book.next_task(entry)[0] for _ in range(5_000))
    worth = {0: 0.05, 1: 0.05, 2: 1.0, 3: 4 * 0.9 * 0.1}
    for task_index, one in worth.items():
        assert drawn[task_index] / 5_000 == pytest.approx(one / sum(worth.values()), abs=0.03)
    assert book.gauges()["e/chosen_success"] == pytest.approx(
        (0.05 + 0.5 + 0.36 * 0.9) / sum(worth.values()), abs=0.03
    )


def test_a_task_without_a_result_counts_as_the_most_worth() -> None:
    book, entry = book_with(num_tasks=2)
    note(book, 0, 0, 1.0)
    drawn = Counter(book.next_task(entry)[0] for _ in range(2_000))
    assert drawn[1] > 1_800


def test_success_runs_from_the_failed_to_the_solved_reward() -> None:
    curriculum = Curriculum(CurriculumSection(failed_reward=-1.0), 3.0, "seed", TaskResults())
    found = []
    for task_index, reward in enumerate((-2.0, -1.0, 1.0, 3.0, 9.0)):
        curriculum.note(GroupId(f"g{task_index}"), task_index, reward)
        curriculum.chosen(task_index)
        found.append(curriculum.metrics()["chosen_success"])
    assert found == [0, 0, 0.5, 1, 1]


def test_metrics_count_the_tasks_of_each_standing() -> None:
    curriculum = Curriculum(CurriculumSection(), 1.0, "seed", TaskResults())
    for place, (task_index, reward) in enumerate(
        [(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0), (2, 0.5), (0, 0.0), (3, 1.0), (3, 1.0)]
    ):
        curriculum.note(GroupId(f"g{place}"), task_index, reward)
    curriculum.chosen(1)
    curriculum.chosen(7)
    assert curriculum.metrics() == {
        "tasks_learning": 2,
        "tasks_solved": 1,
        "tasks_failed": 1,
        "tasks_passed_over": 0,
        "chosen_success": 0,
    }
    assert "chosen_success" not in curriculum.metrics()


def test_a_group_that_is_played_again_counts_once() -> None:
    results = TaskResults()
    for reward in (0.0, 1.0):
        results.note(GroupId("g0"), 3, reward)
    assert results.newest(3) == [1.0]
    for place in range(WINDOW + 3):
        results.note(GroupId(f"h{place}"), 3, float(place))
    assert results.newest(3) == [float(place) for place in range(3, WINDOW + 3)]


def test_a_resumed_run_chooses_as_one_that_was_never_stopped() -> None:
    """The controller is stopped after every choice; the journal alone has the results."""
    live, entry = book_with(num_tasks=6)
    records: list[dict[str, JsonValue]] = [{"kind": "start", "format": 1, "run_id": "r-1"}]
    for number in range(40):
        resumed, again = book_with(6, read_history(records))
        chosen = live.next_task(entry)
        assert resumed.next_task(again) == chosen
        assert again.next_number == entry.next_number
        task_index, seed = chosen
        group = f"g{number:06d}"
        shared: dict[str, JsonValue] = {"group": group, "environment": "e", "task": task_index}
        place: dict[str, JsonValue] = {"number": entry.next_number - 1, "seed": seed, "deadline": 0}
        records.append({"kind": "lease", "server": "s", "epoch": 1} | shared | place)
        reward = [0.0, 1.0, number % 2, 0.5, 1.0, 0.0][task_index]
        records.append({"kind": "result", "reward": reward} | shared)
        live.has_result(GroupId(group), "e", task_index, reward)
