"""The largest messages within their bounds: none holds the controller's loop for long.

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
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.publishing.receivers import place_from_pb
from slipstream.learner.controller.trajectories.intake import SMALL_BYTES as LARGEST_IN_LOOP
from slipstream.protocol.access.checked_calls import SMALL_BYTES
from slipstream.protocol.bounds import decode, max_message_bytes
from slipstream.protocol.codec import decode_trajectory
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.fakes.largest_messages import largest
from support.fakes.named_channel import NamedChannel
from support.rigs.counted_work import counted, num_lines
from support.rigs.fuzz_calls import METHODS, opening
from support.rigs.fuzzing import new
from support.rigs.live_run import LiveRun
from support.rigs.waiting import LIMIT_S

MOST_LINES = 250_000
MOST_VALUES = 1_100_000


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
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
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
        most = 0
        with counted() as work:
            while not done:
                before = work.num_lines
                await asyncio.sleep(0.001)
                most = max(most, work.num_lines - before)
        return most

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
            number += len(value) * num_values(value[0]) if field.is_repeated else num_values(value)
    return number


REQUESTS = [METHODS[name].input_type for name in NAMES]


@pytest.mark.long
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
def test_no_message_holds_the_interpreter_for_long_while_it_is_parsed(kind: Descriptor) -> None:
    # A thread beside the loop cannot be interrupted in it.
    for field, message in largest(kind):
        assert num_values(message) < MOST_VALUES, field


def test_what_is_decoded_in_the_loop_is_small() -> None:
    for kind in (*REQUESTS, trajectory_pb2.Trajectory.DESCRIPTOR):
        most = min(max_message_bytes(type(new(kind))), SMALL_BYTES)
        for field, message in largest(kind, most):
            data = message.SerializeToString()
            lines = num_lines(lambda: decode(type(message), data))  # noqa: B023
            assert lines < MOST_LINES, f"{kind.name}.{field}: {lines}"


def test_what_a_trainer_says_of_its_ranks_and_tensors_is_copied_quickly() -> None:
    for field, hello in largest(trainer_pb2.TrainerHello.DESCRIPTOR):
        lines = num_lines(lambda: tuple(map(place_from_pb, hello.places)))  # noqa: B023
        assert lines < MOST_LINES, f"{field}: {lines}"
    for field, start in largest(trainer_pb2.PublishStart.DESCRIPTOR):
        assert num_values(start.layout) < MOST_VALUES, field


def test_a_trajectory_within_the_limit_of_the_loop_is_decoded_quickly() -> None:
    for field, message in largest(trajectory_pb2.Trajectory.DESCRIPTOR, LARGEST_IN_LOOP):
        arrays = (message.token_ids, message.behavior_logprobs, message.routed_experts.expert_ids)
        message.checksum = zlib.crc32(b"".join(arrays))
        data = message.SerializeToString()

        def decoded() -> None:
            with contextlib.suppress(ProtocolError):
                decode_trajectory(data)  # noqa: B023

        lines = num_lines(decoded)
        assert lines < MOST_LINES, f"{field}: {lines}"
