"""A real engine that loads versions from storage; one JSON line for each thing that was seen.

Run as a program, as `receiver_rig` is. The fetching is a server's own.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path

import numpy as np
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.sections import WeightsSection
from slipstream.core.types import PolicyVersion
from slipstream.extensions.stored_weights.server import FAILED, FetchOrders, StoredWeights
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.engine_interface import LoadedWeights, Sampling
from slipstream.v1 import fleet_pb2, weights_pb2

from support.fakes.gloo_sender import layout_of, pack
from support.rigs.receiver_rig import Rig, parsed, say, started
from support.rigs.running_replies import until_generated
from support.rigs.stored_versions import StoredVersions, digests_of


class StoredRig(Rig):
    """The engine, its server's fetching, and a trainer that writes."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self.reports: asyncio.Queue[fleet_pb2.PublishReport] = asyncio.Queue()
        self.own = folder.parent / "fetched"

    def connect_storage(self, tasks: asyncio.TaskGroup) -> None:
        """Opens both sides of the storage, for the model that was made."""
        url = str(self.folder.parent / "storage")
        layout = layout_of(self.weights["a"], int(self.options.bucket_mib * (1 << 20)))
        specs = [span.tensor for bucket in layout_from_pb(layout) for span in bucket.spans]
        self.versions = StoredVersions(url, specs, layout.bucket_bytes)
        stored = StoredWeights(WeightsSection(storage_url=url), self.own)
        self.orders = FetchOrders(stored, self.reports.put_nowait, tasks)

    def store(self, label: str, *, whole: bool = False) -> None:
        self.step += 1
        weights = self.weights[label]
        content = [pack(bucket, weights).numpy() for bucket in self.versions.buckets]
        self.manifest = self.versions.write(self.step, content, whole=whole)
        self.digests, self.label = digests_of(content, self.versions.buckets), label

    async def fetch(self) -> fleet_pb2.ReceiveWeights:
        """Fetches the newest version while the engine serves; returns the order to load it."""
        self.publishes += 1
        publish_id, version = f"s{self.publishes}", PolicyVersion(0, self.publishes)
        prepare = fleet_pb2.PreparePublish(publish_id=publish_id, stored=self.manifest)
        self.orders.start(prepare)
        report = await self.reports.get()
        self.orders.note(report)
        assert report.phase == fleet_pb2.PUBLISH_PHASE_READY, report.message
        order = weights_pb2.PublishOrder(
            publish_id=publish_id,
            version=version_to_pb(version),
            communicator=weights_pb2.Communicator(
                communicator_id=publish_id, transport="storage", world_size=1
            ),
            new_communicator=True,
            bucket_deadline_s=30.0,
            join_deadline_s=30.0,
        )
        receive = fleet_pb2.ReceiveWeights(order=order)
        return self.orders.completed(fleet_pb2.ControllerMessage(receive=receive)).receive

    async def load(self, receive: fleet_pb2.ReceiveWeights | None = None) -> LoadedWeights | None:
        """Fetches unless that was done, loads and resumes; None when it failed."""
        receive = receive or await self.fetch()
        order = receive.order
        is_busy = self.engine.requests.use().open_requests > 0
        begun_s = time.perf_counter()
        try:
            await self.engine.prepare_weights(order, receive.layout, receive.first_rank)
            prepared_s = time.perf_counter()
            loaded = await self.engine.receive_weights(order.publish_id)
            error = ""
        except WeightSyncError as failure:
            loaded, error = None, str(failure)
        agree = loaded is not None and list(loaded.bucket_digests) == self.digests
        report = fleet_pb2.PublishReport(publish_id=order.publish_id, phase=FAILED)
        if agree:
            assert loaded is not None
            self.sent[PolicyVersion(0, self.publishes)] = self.label
            await self.engine.pauses.resume(PolicyVersion(0, self.publishes))
            report.phase = fleet_pb2.PUBLISH_PHASE_SERVING
        self.orders.note(report)
        say(
            "load",
            weights=self.label,
            digests_agree=agree,
            error=error,
            is_busy=is_busy,
            by_plan=loaded is not None and loaded.by_plan,
            staged=loaded is not None and loaded.staged,
            mbytes=round(Path(order.communicator.path).stat().st_size / 1e6, 3),
            prepare_ms=round(1e3 * (prepared_s - begun_s), 2) if agree else None,
            still_ms=round(1e3 * (time.perf_counter() - prepared_s), 2) if agree else None,
        )
        return loaded if agree else None


async def story(rig: StoredRig) -> None:
    """Whole, changes, several versions at once, changes while replies run, then a cut file."""
    for label in ("a", "b"):
        rig.store(label, whole=True)
        await rig.load()
    planned, bits = await rig.score(), await rig.bits()
    rig.store("near")
    await rig.load()
    patched, near_bits = await rig.score(), await rig.bits()
    # The same version once more, whole.
    rig.orders.note(fleet_pb2.PublishReport(phase=FAILED))
    await rig.load()
    say(
        "changes",
        equal=bool(np.array_equal(patched, await rig.score())),
        bits_equal=near_bits == await rig.bits(),
        differ=float(np.abs(patched - planned).mean()),
    )
    # A server that is behind takes several versions at once.
    for label in ("b", "near", "b"):
        rig.store(label)
    await rig.load()
    say("several", bits_equal=bits == await rig.bits())

    sampling = Sampling(1.0, 1.0, 0, 300, 1, 1000, ignore_eos=True)
    prompts = [[(7 * n + k) % 90 + 2 for k in range(64)] for n in range(8)]
    running = [
        asyncio.create_task(rig.engine.requests.generate(f"r{n}", prompt, sampling, 300))
        for n, prompt in enumerate(prompts)
    ]
    before = rig.engine.requests.use().generated_tokens
    await until_generated(rig.engine, before + 20 * len(prompts), running)
    rig.store("near")
    await rig.load()
    replies = await asyncio.gather(*running)
    say(
        "in_flight",
        tokens=sorted({len(reply.token_ids) for reply in replies}),
        most_versions=max(len(reply.version_spans) for reply in replies),
        bits_equal=near_bits == await rig.bits(),
    )

    rig.store("b")
    receive = await rig.fetch()
    path = Path(receive.order.communicator.path)
    os.truncate(path, path.stat().st_size - 1)
    await rig.load(receive)
    await rig.load()
    say("cut", bits_equal=bits == await rig.bits())


async def main() -> None:
    options = parsed(__doc__)
    rig = StoredRig(options.folder, options)
    await started(rig)
    try:
        async with asyncio.TaskGroup() as tasks:
            rig.connect_storage(tasks)
            await story(rig)
    finally:
        await rig.engine.aclose_fully()


if __name__ == "__main__":
    asyncio.run(main())
