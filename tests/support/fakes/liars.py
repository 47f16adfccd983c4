"""Callers that hold the token and say what no part of ours would say, beside a whole run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from slipstream.learner.controller.application import Controller
from slipstream.protocol.codec import PROTOCOL_VERSION
from slipstream.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trajectory_pb2,
    trajectory_pb2_grpc,
)

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import open_named
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import LIMIT_S, until

STEPS = 6


class Liar:
    """A caller that joins as a rollout server and then says what it is told to say."""

    def __init__(
        self, channel: grpc.aio.Channel, *, epoch: int = 77, process: int = 0
    ) -> None:
        self.channel = channel
        self.epoch = epoch
        self.process = process
        self.outbox: asyncio.Queue[fleet_pb2.ServerMessage] = asyncio.Queue()
        self.leases: asyncio.Queue[fleet_pb2.Lease] = asyncio.Queue()

    async def join(self, max_episodes: int = 64) -> fleet_pb2.Welcome:
        hello = fleet_pb2.ServerHello(
            server_id="liar",
            server_epoch=self.epoch,
            protocol_version=PROTOCOL_VERSION,
            max_episodes=max_episodes,
            engine_workers=1,
            max_model_len=4096,
            queue_bytes=1 << 40,
            process=self.process,
        )
        await self.outbox.put(fleet_pb2.ServerMessage(hello=hello))
        self.call = fleet_pb2_grpc.FleetServiceStub(self.channel).Join(self._messages())
        first = await self.call.read()
        return first.welcome

    async def say(self, **message: Message) -> None:
        await self.outbox.put(fleet_pb2.ServerMessage(**message))

    async def refusal(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return caught.value

    async def _messages(self) -> AsyncIterator[fleet_pb2.ServerMessage]:
        while True:
            yield await self.outbox.get()


Attack = Callable[[grpc.aio.Channel, FakeServer], Awaitable[None]]


async def attacked(tmp_path, caplog, attack: Attack, **changes) -> dict:
    """The summary of a run of an honest server and trainer that was attacked in its middle."""
    config = make_config(tmp_path, run__steps=STEPS, **changes)
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    trainer.hold_at(2)

    async def during(controller: Controller, tasks: list) -> None:
        await until(lambda: trainer.version.step >= 2, 60)
        try:
            async with open_named(config.controller.address) as channel:
                await asyncio.wait_for(attack(channel, server), LIMIT_S)
                status = status_pb2_grpc.StatusServiceStub(channel)
                await status.GetStatus(status_pb2.GetStatusRequest(), timeout=LIMIT_S)
        finally:
            trainer.gate.set()

    with caplog.at_level(logging.ERROR):
        summary = await play(config, server, trainer=trainer, during=during)
    assert (summary["code"], summary["steps"]) == (0, STEPS)
    assert summary["ledger"]["difference"] == 0
    # asyncio complains of the callers' generators, which end in their middle.
    assert not [r for r in caplog.records if r.exc_info]
    return summary


def deliver(channel: grpc.aio.Channel, *requests: trajectory_pb2.DeliverRequest):
    async def messages() -> AsyncIterator[trajectory_pb2.DeliverRequest]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    return trajectory_pb2_grpc.TrajectoryServiceStub(channel).Deliver(
        messages(), timeout=LIMIT_S
    )


async def ended(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()
