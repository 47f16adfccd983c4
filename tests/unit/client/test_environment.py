import random
import re
from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import pytest
from slipstream.client import Environment, Message, Reply
from slipstream.client.conversion import read_message
from slipstream.client.environment import MAX_CACHED_TASKS, TaskSource, ToolCall


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


def test_an_iterator_that_gives_its_tasks_once_is_named_when_they_are_asked_for_again() -> (
    None
):
    once = iter(range(MAX_CACHED_TASKS + 2))
    source = TaskSource(Tasks(lambda: once))
    assert source[MAX_CACHED_TASKS + 1] == MAX_CACHED_TASKS + 1
    with pytest.raises(
        ValueError, match=r"Tasks.tasks\(\) must give its tasks at each call"
    ):
        source[0]


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_no_task_at_all_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"Tasks.tasks\(\) gives no task"):
        TaskSource(Tasks(make))


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, "text"])
def test_tasks_that_are_neither_sequence_nor_iterator_are_refused(
    value: object,
) -> None:
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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": None}, "text of a reply must be a text, got None"),
        ({"content": 3}, "content of a reply must be a text, got 3"),
        (
            {"reasoning": 3, "content": "a"},
            "reasoning of a reply must be a text, got 3",
        ),
        ({"tool_calls": 3}, "tool_calls of a reply must be a list of calls, got 3"),
        (
            {"tool_calls": [{"id": "a"}]},
            "tool_calls of a reply must be a list of calls, got [{'id",
        ),
        (
            {"token_ids": 3},
            "token_ids of a reply must be a list of whole numbers, got 3",
        ),
        (
            {"token_ids": "12"},
            "token_ids of a reply must be a list of whole numbers, got '12'",
        ),
        (
            {"token_ids": [0.5]},
            "token_ids of a reply must be a list of whole numbers, got [0.5]",
        ),
    ],
)
def test_a_part_of_a_reply_that_is_of_another_kind_is_named(
    fields: dict, said: str
) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
        Reply(**{"text": "a"} | fields)


def test_a_reply_has_its_parts_as_they_were_given() -> None:
    calls = (ToolCall("a", "f", {"x": None}),)
    reply = Reply("a", tool_calls=iter(calls), token_ids=np.arange(2))  # type: ignore[arg-type]
    assert (reply.tool_calls, reply.token_ids) == (calls, (0, 1))
    # The message may be shown again.
    again = read_message(Message("assistant", reply, tool_calls=reply.tool_calls))
    assert again.tool_calls == calls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            ToolCall("a", 3, {}),
            "a call of a tool has a function with a name, got ToolCall(id='a',",
        ),  # type: ignore[arg-type]
        (ToolCall(3, "f", {}), "the id of a call must be a text, got 3"),  # type: ignore[arg-type]
        (
            ToolCall("a", "f", [1]),
            "arguments of f must be an object or JSON text, got [1]",
        ),  # type: ignore[arg-type]
        (
            ToolCall("a", "f", {"x": Decimal(1)}),
            "arguments of f must be a JSON object: Decimal('1') is no value of JSON",
        ),
    ],
)
def test_a_call_of_a_tool_with_a_part_of_another_kind_is_named(
    call: ToolCall, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        read_message(Message("assistant", "", tool_calls=(call,)))


def test_an_array_in_place_of_calls_is_named_and_its_scalars_are_numbers() -> None:
    call = {"name": "f", "arguments": {"x": np.int64(3)}}
    settings = {"role": "assistant", "content": ""}
    assert (
        read_message(settings | {"tool_calls": [call]}).tool_calls[0].text == '{"x": 3}'
    )
    with pytest.raises(ValueError, match=r"tool_calls must be a list, got array\("):
        read_message(settings | {"tool_calls": np.array([call, call])})
