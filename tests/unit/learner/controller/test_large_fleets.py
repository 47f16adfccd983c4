"""The work of the controller with many servers, counted as lines that run."""

import asyncio
from pathlib import Path

import numpy as np
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.leasing.scheduler import LeaseWait
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.codec import pack_logprobs
from support.rigs.counted_work import counted, num_lines
from support.rigs.lease_rig import Rig
from support.rigs.publishing_scene import (
    DIGESTS,
    LOADED,
    READY,
    SERVING,
    Scene,
    joined,
    next_order,
    run_of,
    sent,
)

LOGPROBS = pack_logprobs(np.zeros(1, np.float32))


async def publish(scene: Scene, servers: list[ServerSession]) -> None:
    """A whole publish of the run's version, with the orders of each server taken in between."""
    publisher = scene.publisher
    publisher.ask_ahead(scene.run.progress.version)
    preparing = asyncio.ensure_future(publisher.prepare(scene.trainer))
    await asyncio.sleep(0)
    question = (await next_order(servers[0])).prepare.publish_id
    for server in servers:
        scene.say(question, READY, server)
    order = await preparing
    if not order.begun:
        assert publisher.start(scene.start_of(order))
    finishing = scene.finish(order.publish_id)
    await asyncio.sleep(0)
    for phase in (LOADED, SERVING):
        for server in servers:
            values = {"bucket_digests": DIGESTS} if phase == LOADED else {}
            if phase == SERVING and order.verify:
                values = {"probe_logprobs": LOGPROBS}
            scene.say(order.publish_id, phase, server, **values)
    assert not (await finishing).discard_communicator
    while not all(server.is_serving for server in servers):
        await asyncio.sleep(0)
    scene.trainer.communicator_id = order.communicator.communicator_id
    for server in servers:
        sent(server)


async def lines_of_publish(num_servers: int) -> int:
    """The lines of the second publish to a fleet, and of looking for servers that lack it."""
    run = run_of(weights={"verify_every": 100, "bucket_deadline_s": 100.0})
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        scene = Scene(run, tasks)
        servers = [
            scene.session,
            *(scene.joined(f"s{n}") for n in range(num_servers - 1)),
        ]
        await publish(scene, servers)
        scene.make_version(1)
        with counted() as work:
            await publish(scene, servers)
        assert {server.version for server in servers} == {PolicyVersion(0, 1)}
    return work.num_lines


async def test_a_publish_costs_the_same_for_each_server_of_a_small_and_a_large_fleet() -> (
    None
):
    few, many = [await lines_of_publish(number) for number in (16, 64)]
    assert many < 4 * few
    assert (many - few) / 48 < 800


async def test_a_fleet_that_serves_the_newest_version_is_not_looked_through(
    tmp_path: Path,
) -> None:
    lines = []
    for number in (16, 64):
        with Journal(tmp_path / str(number) / "journal") as journal:
            rig = Rig(tmp_path / str(number), journal, algorithm={"max_staleness": 0})
            for server in range(number):
                rig.serving(f"s{server}", 0)
            await rig.lease()
            lines.append(num_lines(rig.scheduler.lease_all))
            assert rig.scheduler.lease_wait == LeaseWait.STALENESS.value
            async with asyncio.TaskGroup() as tasks:
                scene = Scene(rig.run, tasks)
                scene.publisher._fleet = rig.fleet
                lines[-1] += num_lines(lambda: scene.publisher.due(PolicyVersion(0, 0)))  # noqa: B023
    assert lines[0] == lines[1]


def test_a_server_that_changes_its_state_costs_the_same_in_a_large_fleet() -> None:
    lines = []
    for number in (16, 64):
        fleet = Fleet(run_of())
        servers = [joined(fleet, f"s{n}") for n in range(number)]
        lines.append(num_lines(servers[-1].changed))
    assert lines[0] == lines[1]


def test_a_large_fleet_beats_less_often_but_within_its_limit() -> None:
    fleet = Fleet(run_of(controller={"heartbeat_timeout_s": 6.0}))
    intervals_s = []
    for number in range(1024):
        joined(fleet, f"s{number}")
        intervals_s.append(fleet.heartbeat_s)
    assert intervals_s[63] == 0.5
    assert intervals_s[127] == 1.0
    assert intervals_s[-1] == 2.0
    # A steady interval would be 2,048 a second.
    assert sum(1 / intervals_ for intervals_ in intervals_s) < 800
