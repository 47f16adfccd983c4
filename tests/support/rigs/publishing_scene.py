"""Publishes as the controller follows them, with servers that only get orders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.types import PolicyVersion, ServerId
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import (
    JoinedOrder,
    ServerKey,
    ServerSession,
)
from slipstream.protocol.codec import pack_logprobs
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2

from support.rigs.waiting import LIMIT_S

DIGESTS = [b"one", b"two"]
READY = fleet_pb2.PUBLISH_PHASE_READY
LOADED = fleet_pb2.PUBLISH_PHASE_LOADED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


def nothing(*_: object) -> None:
    pass


def run_of(**sections: dict[str, Any] | list[dict[str, Any]]) -> ControlledRun:
    """A run with a learner on this host; `sections` add to its settings.

    Limits may be shorter than settings can be.
    """
    values = {
        "run": {"name": "r", "steps": 100},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
    }
    settings: dict[str, Any] = {}
    limits = {}
    for name, section in sections.items():
        if isinstance(section, list):
            settings[name] = section
            continue
        limits[name] = {
            key: value for key, value in section.items() if key.endswith("_s")
        }
        settings[name] = {
            key: value for key, value in section.items() if not key.endswith("_s")
        }
    config = parse_config(values | settings, source="test")
    changed = {
        name: getattr(config, name).model_copy(update=update)
        for name, update in limits.items()
        if update
    }
    run = ControlledRun(config.model_copy(update=changed), "r")
    run.progress.trainer_registered((place("here"),))
    return run


def place(host: str, *gpus: str, **nccl: str) -> weights_pb2.Place:
    return weights_pb2.Place(host_id=host, gpus=gpus, nccl=nccl)


def joined(fleet: Fleet, name: str, *, max_episodes: int = 0) -> ServerSession:
    """A server on the learner's host."""
    hello = fleet_pb2.ServerHello(
        server_id=name,
        max_episodes=max_episodes,
        engine_workers=1,
        place=weights_pb2.Place(host_id="here"),
    )
    session = ServerSession(ServerKey(ServerId(name), 1), hello, clock=fleet.clock)
    fleet.add(session)
    return session


async def next_order(session: ServerSession) -> fleet_pb2.ControllerMessage:
    async with asyncio.timeout(LIMIT_S):
        return whole(await anext(aiter(session.outbox.messages())))


def whole(
    order: fleet_pb2.ControllerMessage | JoinedOrder,
) -> fleet_pb2.ControllerMessage:
    """The order as the server reads it."""
    is_joined = isinstance(order, JoinedOrder)
    return (
        fleet_pb2.ControllerMessage.FromString(order.encoded()) if is_joined else order
    )


def sent(session: ServerSession) -> list[str]:
    """Kinds of the messages to a server since the last call."""
    messages = []
    while (message := session.outbox.pop()) is not None:
        messages.append(whole(message))
    return [message.WhichOneof("message") for message in messages]


class Scene:
    """One server that serves a version, by a publish through the communicator `trainer` has."""

    def __init__(self, run: ControlledRun, tasks: asyncio.TaskGroup) -> None:
        self.fleet = Fleet(run)
        self.run = run
        self.tasks = tasks
        self.publisher = Publisher(self.fleet, run, tasks)
        self.fleet.listeners = [self.publisher]
        self.session = self.joined("a")
        self.trainer = trainer_pb2.NextRequest(bucket_digests=DIGESTS)

    def joined(self, name: str) -> ServerSession:
        return joined(self.fleet, name)

    async def serve(self) -> None:
        """The first publish, after which the next version is due."""
        order = await self.started()
        assert not order.begun
        self.trainer.communicator_id = order.communicator.communicator_id
        assert not (await self.served(order)).discard_communicator
        self.sent()
        self.make_version(1)

    async def ordered(self, *sessions: ServerSession) -> weights_pb2.PublishOrder:
        """The order of a publish for which these are ready, else the one server that was first.

        They have read all that they were told before.
        """
        sessions = sessions or (self.session,)
        for session in sessions:
            sent(session)
        preparing = self.tasks.create_task(self.publisher.prepare(self.trainer))
        publish_id = (await next_order(sessions[0])).prepare.publish_id
        while not preparing.done():
            for session in sessions:
                self.say(publish_id, READY, session)
            await asyncio.sleep(0)
        order = preparing.result()
        assert order is not None
        return order

    async def started(self, *sessions: ServerSession) -> weights_pb2.PublishOrder:
        """The order of a publish as `ordered` gives it, which the trainer has started."""
        order = await self.ordered(*sessions)
        assert self.publisher.start(self.start_of(order))
        return order

    async def served(
        self, order: weights_pb2.PublishOrder
    ) -> trainer_pb2.PublishReceipt:
        """The trainer's receipt once it has sent; the first server has loaded, and then serves."""
        finishing = self.finish(order.publish_id)
        self.say(order.publish_id, LOADED, bucket_digests=DIGESTS)
        receipt = await finishing
        logprobs = pack_logprobs(np.zeros(1, np.float32))
        self.say(order.publish_id, SERVING, probe_logprobs=logprobs)
        await self.until_serving()
        return receipt

    async def loads(self, order: weights_pb2.PublishOrder) -> None:
        """The first server loads what it was sent, and serves it."""
        self.say(order.publish_id, LOADED, bucket_digests=DIGESTS)
        self.say(order.publish_id, SERVING)
        await self.until_serving()

    def start_of(self, order: weights_pb2.PublishOrder) -> trainer_pb2.PublishStart:
        return trainer_pb2.PublishStart(
            publish_id=order.publish_id, communicator=order.communicator
        )

    def finish(
        self, publish_id: str, **changed: Any
    ) -> asyncio.Task[trainer_pb2.PublishReceipt]:
        probe = weights_pb2.Probe(
            expected_logprobs=pack_logprobs(np.zeros(1, np.float32))
        )
        values = {"publish_id": publish_id, "bucket_digests": DIGESTS, "probe": probe}
        result = trainer_pb2.PublishResult(**values | changed)
        return self.tasks.create_task(self.publisher.finish(result))

    def say(
        self,
        publish_id: str,
        phase: int,
        session: ServerSession | None = None,
        **values: Any,
    ) -> None:
        """A report of `session`, else of the server that was first."""
        report = fleet_pb2.PublishReport(publish_id=publish_id, phase=phase, **values)
        self.publisher.publish_reported(session or self.session, report)

    def sent(self) -> list[str]:
        return sent(self.session)

    def make_version(self, step: int) -> None:
        self.run.progress.reached(PolicyVersion(0, step))
        self.trainer.version.step = step

    async def until_serving(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.session.is_serving:
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def publishing(run: ControlledRun) -> AsyncIterator[Scene]:
    """A scene for at most ten seconds; what a task of it raises ends the block.

    No fixture: pytest would leave the group of tasks in another task than it was entered in.
    """
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        yield Scene(run, tasks)


@contextlib.asynccontextmanager
async def serving(run: ControlledRun) -> AsyncIterator[Scene]:
    """A scene whose server serves a version; the next one is due."""
    async with publishing(run) as scene:
        await scene.serve()
        yield scene
