"""The counts of tokens, and ends that are durable before they are acknowledged."""

import asyncio
from collections.abc import Iterable
from typing import Any

from slipstream.core.types import ServerId, TrajectoryId
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.kinds import TrajectoryEnd
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import fleet_pb2
from support.fakes.fake_trajectories import GOOD
from support.fakes.slow_disk import SlowDisk, several_turns
from support.rigs.lease_rig import ledger_of, note_end
from support.rigs.waiting import LIMIT_S

KEY = ServerKey(ServerId("a"), 1)


def report(generated: int, in_flight: int, ended: int) -> fleet_pb2.ServerReport:
    return fleet_pb2.ServerReport(
        generated_tokens=generated,
        in_flight_tokens=in_flight,
        ended_tokens=ended,
        ended_episodes=1,
        sent=Tally(1, ended).to_pb(),
    )


def test_every_token_is_somewhere():
    ledger = ledger_of(ServerEpochs(), 20)
    ledger.report(KEY, report(100, 30, 70))
    ledger.receive(KEY, TrajectoryId("x"), 40)
    ledger.receive(KEY, TrajectoryId("y"), 20)
    note_end(ledger, TrajectoryEnd.TRAINED, 40)
    now = ledger.snapshot()
    assert (now.generated, now.trained, now.in_flight, now.queued) == (100, 40, 30, 30)
    assert now.difference == 0


def test_a_token_that_went_astray_shows():
    ledger = ledger_of(ServerEpochs())
    ledger.report(KEY, report(100, 0, 90))
    ledger.receive(KEY, TrajectoryId("x"), 90)
    note_end(ledger, TrajectoryEnd.TRAINED, 90)
    assert ledger.snapshot().difference == 10


def test_what_a_dead_server_did_not_deliver_is_lost_until_it_arrives():
    ledger = ledger_of(ServerEpochs())
    ledger.report(KEY, report(100, 60, 40))
    ledger.receive(KEY, TrajectoryId("x"), 30)
    ledger.die(KEY)
    assert ledger.snapshot().lost == 70
    ledger.receive(KEY, TrajectoryId("y"), 10)
    assert ledger.snapshot().lost == 60
    note_end(ledger, TrajectoryEnd.TRAINED, 40)
    assert ledger.snapshot().difference == 0


def test_a_dead_server_may_have_delivered_more_than_it_had_reported():
    ledger = ledger_of(ServerEpochs())
    ledger.report(KEY, report(10, 0, 10))
    ledger.receive(KEY, TrajectoryId("x"), 25)
    ledger.die(KEY)
    now = ledger.snapshot()
    assert (now.generated, now.lost) == (25, 0)


class Receiver:
    """Notes what is acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.changed = asyncio.Event()

    async def acknowledge(self, names: Iterable[TrajectoryId]) -> None:
        self.acknowledged += names
        self.changed.set()


async def test_an_end_is_acknowledged_when_it_is_durable(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    receiver = Receiver()
    queue: Any = receiver
    with Journal(tmp_path) as journal:
        ledger = TokenLedger(ServerEpochs(), list, journal, queue, RunState())
        flushing = asyncio.create_task(ledger.flush())
        disk.hold()
        ledger.end(GOOD, TrajectoryEnd.FAILED, "first")
        await asyncio.to_thread(disk.wait_begun)
        # After the sync under way: not durable with it.
        ledger.acknowledge(TrajectoryId("second"))
        await several_turns()
        assert receiver.acknowledged == []
        disk.go_on()
        async with asyncio.timeout(LIMIT_S):
            await receiver.changed.wait()
            assert receiver.acknowledged == [GOOD.trajectory_id]
            receiver.changed.clear()
            await receiver.changed.wait()
        assert receiver.acknowledged == [GOOD.trajectory_id, "second"]
        flushing.cancel()
