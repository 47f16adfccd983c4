"""A trajectory is acknowledged when its end is durable, and not before."""

import asyncio
from collections.abc import Iterable
from typing import Any

from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.records.history import TrajectoryEnd
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.trajectories.endings import Endings
from support.fakes.fake_trajectories import GOOD
from support.fakes.slow_disk import SlowDisk, several_turns
from support.rigs.lease_rig import ledger_of

LIMIT_S = 5.0


class Receiver:
    """Notes what is acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.changed = asyncio.Event()

    async def acknowledge(self, names: Iterable[TrajectoryId]) -> None:
        self.acknowledged += names
        self.changed.set()


async def test_an_end_is_acknowledged_when_it_is_durable(tmp_path, monkeypatch):
    disk, receiver = SlowDisk(monkeypatch), Receiver()
    queue: Any = receiver
    with Journal(tmp_path) as journal:
        endings = Endings(journal, ledger_of(ServerEpochs()), queue)
        flushing = asyncio.create_task(endings.flush())
        disk.hold()
        endings.end(GOOD, TrajectoryEnd.FAILED, "first")
        await asyncio.to_thread(disk.wait_begun)
        # Behind the sync under way: not durable with it.
        endings.acknowledge(TrajectoryId("second"))
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
