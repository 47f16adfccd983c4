"""Nothing that the controller serves answers without the token, and absurd callers are refused."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from slipstream.protocol.access.security import call_metadata
from slipstream.protocol.codec import PROTOCOL_VERSION
from slipstream.v1 import (
    environment_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
)
from support.fakes.guarded_controller import TOKEN, serving, with_token
from support.fakes.named_channel import RUN_ID
from support.rigs.waiting import LIMIT_S

MODULES = (environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)
OTHERS = (health_pb2, reflection_pb2)


def services() -> Iterator[ServiceDescriptor]:
    for module in (*MODULES, *OTHERS):
        yield from module.DESCRIPTOR.services_by_name.values()


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, token: str | None
) -> None:
    """Sends one empty request, or opens a stream of requests that never comes to the first one.

    A request that is sent when the answer has come already ends a call of grpc with INTERNAL.
    """

    async def requests() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    shapes = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    kind = shapes[method.client_streaming, method.server_streaming]
    method_call = kind(f"/{method.containing_service.full_name}/{method.name}")(
        requests() if method.client_streaming else b"",
        metadata=call_metadata(with_token(token)),
        timeout=LIMIT_S,
    )
    if method.server_streaming:
        await method_call.read()
    else:
        await method_call


async def test_no_method_answers_without_the_token(tmp_path: Path) -> None:
    methods = [method for service in services() for method in service.methods]
    served = {f"{method.containing_service.name}.{method.name}" for method in methods}
    assert {
        "FleetService.Join",
        "StatusService.StopRun",
        "TrainerService.Next",
    } <= served
    # Served by rollout servers, on a unix socket of their own.
    methods = [m for m in methods if m.containing_service.name != "WorkerService"]
    async with (
        serving(tmp_path) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for method in methods:
            for token in (None, "", TOKEN[:-1], TOKEN.upper()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, method, token)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, (
                    method.full_name
                )


IMPOSSIBLE = [
    ({"server_id": "../../etc"}, "the id of a rollout server has up to 100 letters"),
    ({"server_id": ""}, "the id of a rollout server has up to 100 letters"),
    ({"server_id": "s" * 101}, "the id of a rollout server has up to 100 letters"),
    (
        {"server_id": "s" * 10_000},
        "hello.server_id must have at most 128 bytes, got 10000",
    ),
    ({"server_id": "s\x1b[2J"}, r"hello.server_id must hold ASCII letters, digits and"),
    ({"engine_workers": 0}, "an engine has 1 to 1024 workers, got 0"),
    ({"engine_workers": 2**31}, "an engine has 1 to 1024 workers, got 2147483648"),
    ({"max_episodes": 0}, "room for 0 episodes, a group has 4"),
    (
        {"queue_bytes": (256 << 20) - 1},
        "a queue of 268435455 bytes, queue.max_bytes of the ",
    ),
    (
        {"engine_settings": '{"model.dtype": "float16"}'},
        "an engine with model.dtype = float16, ",
    ),
    ({"engine_settings": '{"sampling.top_k": 3}'}, "an engine with "),
    ({"engine_settings": "[]"}, "an engine with settings that cannot be read: []"),
]
GREETING = {
    "server_id": "s0",
    "server_epoch": 1,
    "protocol_version": PROTOCOL_VERSION,
    "max_episodes": 64,
    "engine_workers": 1,
    "max_model_len": 4096,
    "queue_bytes": 256 << 20,
}


async def test_a_server_that_cannot_be_is_refused_by_name_and_rule(
    tmp_path: Path,
) -> None:
    async def messages(hello: dict) -> AsyncIterator[fleet_pb2.ServerMessage]:
        yield fleet_pb2.ServerMessage(hello=fleet_pb2.ServerHello(**(GREETING | hello)))
        await asyncio.Event().wait()

    async with (
        serving(tmp_path) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for hello, rule in IMPOSSIBLE:
            join = fleet_pb2_grpc.FleetServiceStub(channel).Join(
                messages(hello),
                metadata=call_metadata(with_token(TOKEN), RUN_ID),
                timeout=LIMIT_S,
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await join.read()
            is_bound = rule.startswith("hello.")
            assert caught.value.code() is (
                grpc.StatusCode.INVALID_ARGUMENT
                if is_bound
                else grpc.StatusCode.FAILED_PRECONDITION
            )
            assert rule in caught.value.details()
            assert len(caught.value.details()) < 400
