"""The largest messages within their bounds: none holds the controller's loop for long.

What is measured is the processor time of the loop's thread between two beats of the loop, so other
work on the machine does not count; what a thread beside it does with the interpreter's lock does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.publishing.transport_choice import place_from_pb
from slipstream.learner.controller.trajectories.intake import SMALL_BYTES as LARGEST_IN_LOOP
from slipstream.protocol.access.checked_calls import SMALL_BYTES
from slipstream.protocol.bounds import decode, max_message_bytes
from slipstream.protocol.codec import decode_trajectory
from slipstream.v1 import fleet_pb2, trainer_pb2, trajectory_pb2
from support.fakes.largest_messages import largest
from support.rigs.fuzz_calls import METHODS, opening
from support.rigs.fuzzing import new
from support.rigs.live_run import LiveRun

# 50 ms on a machine that has nothing else to do; a busy one has colder caches.
HELD_S = 0.05
SLACK = 3.0


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
    with grpc.insecure_channel(address, options) as channel:
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


def held_s(live: LiveRun, doing) -> float:
    """The longest processor time of the loop's thread between two beats while that is done."""

    async def beat() -> float:
        longest_s, before_s = 0.0, time.thread_time()
        while not done:
            await asyncio.sleep(0.001)
            now_s = time.thread_time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        return longest_s

    done: list[bool] = []
    beating = live.start(beat())
    try:
        doing()
    finally:
        done.append(True)
    return beating.result(60)


NAMES = [name for name in METHODS if name not in ("StopRun", "DrainServer")]


@pytest.mark.parametrize("name", NAMES)
def test_no_message_holds_the_loop_for_long(live: LiveRun, name: str) -> None:
    for field, message in largest(METHODS[name].input_type):
        messages = streams(name, message)
        held = held_s(live, lambda: say(live.address, name, messages))  # noqa: B023
        assert held < SLACK * HELD_S, f"{field} holds the loop for {held:.3f} s"


def took_s(doing: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    doing()
    return time.thread_time() - begun_s


REQUESTS = [METHODS[name].input_type for name in NAMES]


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
def test_no_message_holds_the_interpreter_for_long_while_it_is_parsed(kind: Descriptor) -> None:
    # A thread beside the loop cannot be interrupted in it.
    for field, message in largest(kind):
        data = message.SerializeToString()
        took = took_s(lambda: type(message).FromString(data))  # noqa: B023
        assert took < SLACK * HELD_S, f"{field} takes {took:.3f} s"


def test_what_is_decoded_in_the_loop_is_small() -> None:
    for kind in (*REQUESTS, trajectory_pb2.Trajectory.DESCRIPTOR):
        most = min(max_message_bytes(type(new(kind))), SMALL_BYTES)
        for field, message in largest(kind, most):
            data = message.SerializeToString()
            took = took_s(lambda: decode(type(message), data))  # noqa: B023
            assert took < SLACK * HELD_S, f"{kind.name}.{field} takes {took:.3f} s"


def test_what_a_trainer_says_of_its_ranks_and_tensors_is_copied_quickly() -> None:
    for field, hello in largest(trainer_pb2.TrainerHello.DESCRIPTOR):
        took = took_s(lambda: tuple(map(place_from_pb, hello.places)))  # noqa: B023
        assert took < SLACK * HELD_S, f"{field} takes {took:.3f} s"
    for field, start in largest(trainer_pb2.PublishStart.DESCRIPTOR):
        # No tensor has so many dimensions, and all models fewer tensors.
        if not field.endswith("shape"):
            took = took_s(lambda: fleet_pb2.ReceiveWeights(layout=start.layout))  # noqa: B023
            assert took < SLACK * HELD_S, f"{field} takes {took:.3f} s"


def test_a_trajectory_within_the_limit_of_the_loop_is_decoded_quickly() -> None:
    for field, message in largest(trajectory_pb2.Trajectory.DESCRIPTOR, LARGEST_IN_LOOP):
        arrays = (message.token_ids, message.behavior_logprobs, message.routed_experts.expert_ids)
        message.checksum = zlib.crc32(b"".join(arrays))
        data = message.SerializeToString()

        def decoded() -> None:
            with contextlib.suppress(ProtocolError):
                decode_trajectory(data)  # noqa: B023

        took = took_s(decoded)
        assert took < SLACK * HELD_S, f"{field} takes {took:.3f} s"
