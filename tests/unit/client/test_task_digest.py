import dataclasses
from typing import Any

import numpy as np
import pytest
from slipstream.client import Environment
from slipstream.client.environment import TaskSource
from slipstream.client.episode_host import MAX_LISTED, digest_of, spaced


class Given(Environment[Any]):
    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    def tasks(self) -> Any:
        return self._tasks() if callable(self._tasks) else self._tasks


@dataclasses.dataclass
class Row:
    text: str
    number: object = 0


def digest(tasks: Any) -> str:
    return digest_of(TaskSource(Given(tasks)))


# The name of a test must be the same in each process; that of a set's elements is not.
TASKS = {
    "texts": ["a", "b"],
    "tables": [{"a": 1}, {"a": 2}],
    "objects": [Row("a", 1.5), Row("b", b"x")],
    "sets": [{"words": {"a", "b", "c"}}, {"words": {"d"}}],
    "arrays": [np.arange(3), np.ones(2)],
    "keys": [{(1, 2): "key"}, None],
}


@pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)
def test_a_digest_tells_order_number_and_content(tasks: list[Any]) -> None:
    digest_of_tasks = digest(tasks)
    assert (
        len(
            {
                digest_of_tasks,
                digest(tasks[::-1]),
                digest(tasks[:1]),
                digest([*tasks, "z"]),
            }
        )
        == 4
    )
    assert digest(list(tasks)) == digest_of_tasks


def test_objects_count_by_their_type_and_sets_have_no_order() -> None:
    assert digest([object()]) == digest([object()])
    assert digest([{"x", "y", "z"}]) == digest([{"z", "y", "x"}])
    assert digest([Row("a", {"x"})]) != digest([Row("a", {"y"})])


def test_iterators_count_by_their_first_tasks() -> None:
    assert digest(lambda: iter(range(100))) == digest(lambda: iter(range(200)))
    assert digest(lambda: iter(range(100))) != digest(lambda: iter(range(1, 100)))


def test_tasks_that_cannot_be_read_have_no_digest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            raise OSError("no disk")

    assert digest(Broken()) == ""
    assert "no disk" in capsys.readouterr().err


def test_a_sample_is_spaced_from_first_to_last() -> None:
    assert list(spaced(3, 5)) == [0, 1, 2]
    assert list(spaced(10, 4)) == [0, 3, 6, 9]
    sample = spaced(10**6, MAX_LISTED)
    assert (len(set(sample)), sample[0], sample[-1]) == (MAX_LISTED, 0, 10**6 - 1)
