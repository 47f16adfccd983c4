import random
from collections.abc import Iterator

import pytest
from slipstream.client import Environment
from slipstream.client.environment import MAX_CACHED_TASKS, TaskSource


class Tasks(Environment[object]):
    def __init__(self, make: object) -> None:
        self.make = make
        self.starts = 0

    def tasks(self) -> object:
        self.starts += 1
        return self.make()


class Dataset:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return f"row {index}"


def seeded() -> Iterator[float]:
    generator = random.Random(7)
    while True:
        yield generator.random()


def test_tasks_of_a_sequence_begin_again_after_the_last() -> None:
    source = TaskSource(Tasks(lambda: ["a", "b", "c"]))
    assert source.num_tasks == 3
    assert [source[i] for i in range(5)] == ["a", "b", "c", "a", "b"]


def test_anything_with_a_length_and_items_is_a_sequence() -> None:
    source = TaskSource(Tasks(Dataset))
    assert (source.num_tasks, source[4]) == (3, "row 1")


def test_tasks_of_an_iterator_are_the_same_in_any_order() -> None:
    expected = [task for task, _ in zip(seeded(), range(50), strict=False)]
    source = TaskSource(Tasks(seeded))
    assert source.num_tasks == 0
    for index in (30, 3, 49, 0, 30):
        assert source[index] == expected[index]


def test_an_iterator_starts_again_only_for_a_task_that_was_dropped() -> None:
    environment = Tasks(seeded)
    source = TaskSource(environment)
    first = source[0]
    assert source[MAX_CACHED_TASKS - 1] is not None
    assert (source[0], environment.starts) == (first, 1)
    assert source[MAX_CACHED_TASKS] is not None
    assert (source[0], environment.starts) == (first, 2)


def test_an_iterator_with_an_end_begins_again() -> None:
    source = TaskSource(Tasks(lambda: iter("abc")))
    assert [source[i] for i in (5, 0, 3, 1)] == ["c", "a", "a", "b"]


def test_an_error_in_an_iterator_does_not_end_the_tasks() -> None:
    faults = iter([OSError("the network is away")])

    def loaded() -> Iterator[str]:
        for letter in "abcd":
            if letter == "c":
                yield from (raised(fault) for fault in faults)
            yield letter

    def raised(fault: OSError) -> str:
        raise fault

    source = TaskSource(Tasks(loaded))
    with pytest.raises(OSError, match="the network is away"):
        source[2]
    assert [source[i] for i in (2, 3, 0, 4)] == ["c", "d", "a", "a"]


def test_an_iterator_that_gives_its_tasks_once_is_named_when_they_are_asked_for_again() -> None:
    once = iter(range(MAX_CACHED_TASKS + 2))
    source = TaskSource(Tasks(lambda: once))
    assert source[MAX_CACHED_TASKS + 1] == MAX_CACHED_TASKS + 1
    with pytest.raises(ValueError, match=r"Tasks.tasks\(\) must give its tasks at each call"):
        source[0]


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_no_task_at_all_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"Tasks.tasks\(\) gives no task"):
        TaskSource(Tasks(make))


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, "text"])
def test_tasks_that_are_neither_sequence_nor_iterator_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f"got {type(value).__name__}"):
        TaskSource(Tasks(lambda: value))


def test_an_async_tasks_method_is_refused() -> None:
    class Wrong(Environment[int]):
        async def tasks(self) -> list[int]:
            return [1]

    with pytest.raises(ValueError, match="got coroutine"):
        TaskSource(Wrong())


def test_a_missing_method_says_which() -> None:
    with pytest.raises(NotImplementedError, match=r"Environment must define tasks\(\)"):
        TaskSource(Environment())
