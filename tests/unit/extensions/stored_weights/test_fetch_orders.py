"""Orders to fetch a version, carried out while the engine serves."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights.server import FetchOrders, StoredWeights
from slipstream.v1 import fleet_pb2, weights_pb2
from support.rigs.stored_versions import StoredVersions, changed_content, first_content
from support.rigs.waiting import LIMIT_S, until

READY = fleet_pb2.PUBLISH_PHASE_READY
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


class SlowStorage(StoredWeights):
    """Fetches when it is told to, or when it is abandoned."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(WeightsSection(storage_url=url), folder)
        self.gate = threading.Event()
        self.num_abandoned = 0

    def fetch(self, stored, abandoned):
        while not self.gate.wait(0.01):
            if abandoned.is_set():
                self.num_abandoned += 1
                break
        return super().fetch(stored, abandoned)


class Rig:
    def __init__(self, tmp_path: Path, tasks: asyncio.TaskGroup) -> None:
        url = str(tmp_path / "storage")
        self.content = first_content()
        self.versions = StoredVersions(url)
        self.manifest = self.versions.write(0, self.content, whole=True)
        self.stored = SlowStorage(url, tmp_path / "a")
        self.reports: list[fleet_pb2.PublishReport] = []
        self.orders = FetchOrders(self.stored, self.reports.append, tasks)

    def start(self, publish_id: str) -> None:
        self.orders.start(
            fleet_pb2.PreparePublish(publish_id=publish_id, stored=self.manifest)
        )

    def write_changes(self) -> None:
        """The next version, which changes a hundredth of the one before."""
        step = len(self.versions.chain)
        self.content = changed_content(self.content, share=0.01, seed=step)
        self.manifest = self.versions.write(step, self.content, whole=False)

    async def order_after(self, publish_id: str) -> None:
        """Has a version fetched, and its order to load completed."""
        number = len(self.reports)
        self.start(publish_id)
        await self.until_reported(number + 1)
        assert self.reports[-1].phase == READY, self.reports[-1].message
        assert self.completed(publish_id).order.communicator.path

    def judged(self, publish_id: str, *, passed: bool) -> None:
        verdict = fleet_pb2.ProbeVerdict(publish_id=publish_id, passed=passed)
        self.orders.completed(fleet_pb2.ControllerMessage(probe_verdict=verdict))

    async def until_reported(self, number: int) -> None:
        await until(lambda: len(self.reports) >= number)

    def completed(self, publish_id: str) -> fleet_pb2.ReceiveWeights:
        order = weights_pb2.PublishOrder(publish_id=publish_id)
        order.communicator.transport = "storage"
        message = fleet_pb2.ControllerMessage(
            receive=fleet_pb2.ReceiveWeights(order=order)
        )
        return self.orders.completed(message).receive


@contextlib.asynccontextmanager
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        rig = Rig(tmp_path, tasks)
        yield rig
        rig.orders.close()


async def test_an_order_to_load_gets_layout_and_file_of_what_was_fetched(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as scene:
        scene.start("s1")
        await asyncio.sleep(0.05)
        # The loop is free, and the engine serves, while it fetches.
        assert scene.reports == []
        scene.stored.gate.set()
        await scene.until_reported(1)
        (report,) = scene.reports
        assert (report.publish_id, report.phase) == ("s1", READY)
        assert report.stages.fetched_bytes > 0
        receive = scene.completed("s1")
        assert len(receive.layout.tensors) == 4
        assert Path(receive.order.communicator.path).is_file()
        assert scene.completed("s2").order.communicator.path == ""


async def test_a_newer_version_ends_the_fetch_of_an_older_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as scene:
        scene.start("s1")
        scene.start("s2")
        await scene.until_reported(1)
        scene.stored.gate.set()
        await scene.until_reported(2)
        assert [(r.publish_id, r.phase) for r in scene.reports] == [
            ("s1", FAILED),
            ("s2", READY),
        ]
        assert scene.completed("s1").order.communicator.path == ""


@pytest.mark.parametrize("is_judged", [True, False])
async def test_after_weights_that_were_wrong_all_is_fetched_again(tmp_path, is_judged):
    async with rig(tmp_path) as scene:
        scene.stored.gate.set()
        await scene.order_after("s1")
        scene.judged("s1", passed=True)
        scene.write_changes()
        await scene.order_after("s2")
        first, changes = (report.stages.fetched_bytes for report in scene.reports)
        assert changes < first
        if is_judged:
            scene.judged("s2", passed=False)
        else:
            scene.orders.note(fleet_pb2.PublishReport(publish_id="s2", phase=FAILED))
        await scene.order_after("s3")
        assert scene.reports[-1].stages.fetched_bytes > first
