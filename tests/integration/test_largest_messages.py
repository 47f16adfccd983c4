"""The largest messages within their bounds: none holds the controller's loop for long.

For every field that may hold much, at any depth, one message in which it holds all that it may: as
many elements, or as long a text, as its bound and the size of the whole message allow.

Two things are counted: the lines that the loop's thread runs between two beats of the loop, and the
values of a message, which a thread parses without a break. A quarter of a million lines, and a
million values, take a few hundredths of a second.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.trajectories.intake import (
    SMALL_BYTES as LARGEST_IN_LOOP,
)
from slipstream.protocol.access.checked_calls import SMALL_BYTES
from slipstream.protocol.bounds import bound_of, decode, max_message_bytes
from slipstream.protocol.codec import decode_trajectory
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.fakes.named_channel import NamedChannel
from support.rigs.counted_work import counted, num_lines
from support.rigs.fuzz_calls import METHODS, opening
from support.rigs.fuzzing import new
from support.rigs.live_run import LiveRun
from support.rigs.waiting import LIMIT_S

MOST_LINES = 250_000
MOST_VALUES = 1_100_000
# The way to a field.
FieldPath = tuple[FieldDescriptor, ...]
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
DEPTH = 5


def largest(kind: Descriptor, most_bytes: int = 0) -> Iterator[tuple[str, Message]]:
    """The name of a field and the message that is full of it, for all fields that hold much.

    Lists of texts come twice: with the longest, and with more and empty ones.
    """
    limit = most_bytes or max_message_bytes(type(new(kind)))
    for path in paths(kind):
        name = ".".join(field.name for field in path)
        yield name, _full(kind, path, limit)
        if path[-1].is_repeated and path[-1].type in TEXTS:
            yield f"{name}, empty", _full(kind, path, limit, is_empty=True)


def paths(kind: Descriptor, before: FieldPath = ()) -> Iterator[FieldPath]:
    """The ways to all fields that may hold much."""
    if len(before) == DEPTH:
        return
    for field in kind.fields:
        inner = field.message_type
        path = (*before, field)
        is_map = inner is not None and inner.GetOptions().map_entry
        if field.is_repeated or field.type in TEXTS:
            yield path
        if inner is not None and not is_map:
            yield from paths(inner, path)


def _full(
    kind: Descriptor, path: FieldPath, limit: int, *, is_empty: bool = False
) -> Message:
    field, *below = path
    message = new(kind)
    bound = bound_of(field)
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        texts = inner.fields_by_name["value"].type in TEXTS
        size = min(bound.max_bytes, max(1, limit // bound.max_items - 16))
        for number in range(min(bound.max_items, limit // (size + 20))):
            name = f"{number:07d}".ljust(size, "x")[:size] if size >= 7 else str(number)
            getattr(message, field.name)[name] = "" if texts else 0.5
    elif field.is_repeated:
        assert bound is not None
        if below:
            element: object = _full(inner, tuple(below), limit, is_empty=is_empty)
        else:
            element = _element(field, 0 if is_empty else limit)
        size = element.ByteSize() if isinstance(element, Message) else _size(element)
        # Eight bytes for the tag and the length at most, two where there is nothing in it.
        count = max(1, min(bound.max_items, limit // (size + (8 if size > 100 else 2))))
        getattr(message, field.name).extend([element] * count)
    elif inner is not None:
        getattr(message, field.name).CopyFrom(
            _full(inner, tuple(below), limit - 16, is_empty=is_empty)
        )
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _element(field, limit - 16))
    return message


def _element(field: FieldDescriptor, limit: int) -> object:
    """The longest text, the number with the most bytes, or an empty message."""
    bound = bound_of(field)
    if field.message_type is not None:
        return new(field.message_type)
    assert bound is not None
    if field.type in TEXTS:
        size = min(bound.max_bytes, limit)
        return "x" * size if field.type == FieldDescriptor.TYPE_STRING else b"x" * size
    if field.enum_type is not None:
        return max(field.enum_type.values_by_number)
    return bound.max if field.type == FieldDescriptor.TYPE_DOUBLE else int(bound.max)


def _size(value: object) -> int:
    return max(len(value), 1) if isinstance(value, str | bytes) else 10


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[LiveRun]:
    with LiveRun(tmp_path_factory.mktemp("live")) as run:
        yield run
    assert run.code == 0
    assert run.complaints.lines == []


def streams(name: str, message: Message) -> list[bytes]:
    """The messages of a call; a stream begins as an honest one does."""
    data = message.SerializeToString()
    if name in ("Join", "ServeEpisodes") and message.WhichOneof("message") != "hello":
        return [opening(name, "large"), data]
    return [data]


def say(address: str, name: str, messages: list[bytes]) -> grpc.StatusCode:
    """Says them from this thread, and waits for the end of the call, or two seconds."""
    method = METHODS[name]
    path = f"/{method.containing_service.full_name}/{method.name}"
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]
    with grpc.insecure_channel(address, options) as unnamed:
        channel = NamedChannel(unnamed)
        try:
            if method.client_streaming:
                for _ in channel.stream_stream(path)(iter(messages), timeout=2):
                    pass
            elif method.server_streaming:
                next(iter(channel.unary_stream(path)(messages[0], timeout=2)), None)
            else:
                channel.unary_unary(path)(messages[0], timeout=20)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def held_lines(live: LiveRun, doing: Callable[[], object]) -> int:
    """The most lines of the loop's thread between two beats while that is done."""

    async def beat() -> int:
        largest = 0
        with counted() as work:
            while not done:
                before = work.num_lines
                await asyncio.sleep(0.001)
                largest = max(largest, work.num_lines - before)
        return largest

    done: list[bool] = []
    beating = live.start(beat())
    try:
        doing()
    finally:
        done.append(True)
    return beating.result(LIMIT_S)


NAMES = [name for name in METHODS if name not in ("StopRun", "DrainServer")]


# The others are alike.
QUICK = ("Join", "Deliver", "ReportStep")


@pytest.mark.long_but(*QUICK)
@pytest.mark.parametrize("name", NAMES)
def test_no_message_holds_the_loop_for_long(live: LiveRun, name: str) -> None:
    for field, message in largest(METHODS[name].input_type):
        messages = streams(name, message)
        lines = held_lines(live, lambda: say(live.address, name, messages))  # noqa: B023
        assert lines < MOST_LINES, f"{field} holds the loop for {lines} lines"


def num_values(message: Message) -> int:
    """The number of values in a message, at any depth; the elements of a list are all the same."""
    number = 0
    for field, value in message.ListFields():
        number += len(value) if field.is_repeated else 1
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            number += (
                len(value) * num_values(value[0])
                if field.is_repeated
                else num_values(value)
            )
    return number


REQUESTS = [METHODS[name].input_type for name in NAMES]


@pytest.mark.long
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
def test_no_message_holds_the_interpreter_for_long_while_it_is_parsed(
    kind: Descriptor,
) -> None:
    # A thread beside the loop cannot be interrupted in it.
    for field, message in largest(kind):
        assert num_values(message) < MOST_VALUES, field


def test_what_is_decoded_in_the_loop_is_small() -> None:
    for kind in (*REQUESTS, trajectory_pb2.Trajectory.DESCRIPTOR):
        max_bytes = min(max_message_bytes(type(new(kind))), SMALL_BYTES)
        for field, message in largest(kind, max_bytes):
            data = message.SerializeToString()
            lines = num_lines(lambda: decode(type(message), data))  # noqa: B023
            assert lines < MOST_LINES, f"{kind.name}.{field}: {lines}"


def test_what_a_trainer_says_of_its_tensors_is_copied_quickly() -> None:
    for field, start in largest(trainer_pb2.PublishStart.DESCRIPTOR):
        assert num_values(start.layout) < MOST_VALUES, field


def test_a_trajectory_within_the_limit_of_the_loop_is_decoded_quickly() -> None:
    for field, message in largest(
        trajectory_pb2.Trajectory.DESCRIPTOR, LARGEST_IN_LOOP
    ):
        arrays = (
            message.token_ids,
            message.behavior_logprobs,
            message.routed_experts.expert_ids,
        )
        message.checksum = zlib.crc32(b"".join(arrays))
        data = message.SerializeToString()

        def decoded() -> None:
            with contextlib.suppress(ProtocolError):
                decode_trajectory(data)  # noqa: B023

        lines = num_lines(decoded)
        assert lines < MOST_LINES, f"{field}: {lines}"
