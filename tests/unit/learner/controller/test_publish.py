"""Publishes as the controller follows them, with servers that only get orders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.fleet import Fleet, FleetHandlers, ServerSession
from slipstream.learner.controller.groups import ServerKey
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.publish import Publisher
from slipstream.protocol.config_file import parse_config
from slipstream.protocol.transports import Place
from slipstream.protocol.types import ServerId
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2


def nothing(*_: object) -> None:
    pass


@pytest.fixture
def progress() -> RunProgress:
    values: dict[str, Any] = {
        "run": {"name": "published", "steps": 1},
        "model": {"path": "model"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
    }
    made = RunProgress("published", parse_config(values, source="test"), EventLog())
    made.learner_places = (Place("here"),)
    return made


def joined(fleet: Fleet, name: str) -> ServerSession:
    hello = fleet_pb2.ServerHello(
        server_id=name, engine_workers=1, place=weights_pb2.Place(host_id="here")
    )
    session = ServerSession(ServerKey(ServerId(name), "1"), hello)
    fleet.add(session)
    return session


async def next_order(session: ServerSession) -> fleet_pb2.ControllerMessage:
    async with asyncio.timeout(10):
        message = await session.outbox.get()
    assert message is not None
    return message


async def ordered(
    publisher: Publisher, session: ServerSession, tasks: asyncio.TaskGroup
) -> weights_pb2.PublishOrder:
    """The order of a publish for which the server is ready."""
    preparing = tasks.create_task(publisher.prepare())
    publish_id = (await next_order(session)).prepare.publish_id
    ready = fleet_pb2.PublishReport(publish_id=publish_id, phase=fleet_pb2.PUBLISH_PHASE_READY)
    while not preparing.done():
        publisher.report(session, ready)
        await asyncio.sleep(0)
    order = preparing.result()
    assert order is not None
    return order


async def test_a_trainer_that_is_told_to_leave_its_communicator_is_given_a_new_one(
    progress: RunProgress,
) -> None:
    fleet = Fleet(progress)
    fleet.handlers = FleetHandlers(nothing, nothing, nothing, nothing, nothing, nothing)
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(fleet, progress, tasks)
        session = joined(fleet, "a")
        first = await ordered(publisher, session, tasks)
        result = trainer_pb2.PublishResult(publish_id="one that is over")
        assert (await publisher.finish(result)).discard_communicator
        second = await ordered(publisher, session, tasks)
    assert second.new_communicator
    assert second.communicator.communicator_id != first.communicator.communicator_id


async def test_servers_are_told_once_to_receive_when_the_trainer_repeats_its_call(
    progress: RunProgress,
) -> None:
    fleet = Fleet(progress)
    fleet.handlers = FleetHandlers(nothing, nothing, nothing, nothing, nothing, nothing)
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(fleet, progress, tasks)
        session = joined(fleet, "a")
        order = await ordered(publisher, session, tasks)
        start = trainer_pb2.PublishStart(
            publish_id=order.publish_id, communicator=order.communicator
        )
        assert publisher.start(start) == publisher.start(start)
        assert (await next_order(session)).HasField("receive")
        assert session.outbox.empty()
        publisher.trainer_lost()


async def test_a_trainer_lost_while_servers_load_leaves_none_of_them_loading(
    progress: RunProgress,
) -> None:
    fleet = Fleet(progress)
    fleet.handlers = FleetHandlers(nothing, nothing, nothing, nothing, nothing, nothing)
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(fleet, progress, tasks)
        session = joined(fleet, "a")
        order = await ordered(publisher, session, tasks)
        publish_id = order.publish_id
        start = trainer_pb2.PublishStart(publish_id=publish_id, communicator=order.communicator)
        assert publisher.start(start)
        assert (await next_order(session)).HasField("receive")
        assert session.state == fleet_pb2.SERVER_STATE_LOADING
        # gRPC cancels a call whose client is gone.
        finishing = asyncio.create_task(
            publisher.finish(trainer_pb2.PublishResult(publish_id=publish_id))
        )
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert session.state == fleet_pb2.SERVER_STATE_STALE
        assert (await next_order(session)).abort.publish_id == publish_id
        session.retry_publish_s = 0.0
        assert publisher.due() == [session]
