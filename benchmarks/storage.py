"""Writes versions of a model's shape to storage and fetches them, whole and as changes.

    python benchmarks/storage.py --folder /mnt/disk

One trainer rank and one rollout server without engine, on one thread each, in turns. The limit is
copying the same bytes there and back. Seconds are of the processor, since a machine may be shared;
the clock's are beside them in the result. Prints one table and writes
benchmarks/results/storage.json. Takes a minute, 4 GB of memory and 3 GB of disk for 0.6B.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from measure import Spread, progress, settings_of, table, write_result
from shapes import SHAPES
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.version_writer import RankObjects
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb, plan_buckets
from slipstream.protocol.weights.digests import HostDigests, bucket_digest
from slipstream.protocol.weights.storage import Storage, Until
from slipstream.rollout_server.stored_weights import StoredWeights
from slipstream.v1 import weights_pb2

BUCKET_BYTES = 64 << 20
LIMIT_S = 600.0


# Seconds of the processor, and of the clock.
Times = tuple[float, float]


class Clock:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._processor_s, self._clock_s = time.process_time(), time.monotonic()

    def read(self) -> Times:
        """Returns the times since."""
        processor_s = time.process_time() - self._processor_s
        return round(processor_s, 3), round(time.monotonic() - self._clock_s, 3)


class Weights:
    """Random bfloat16 weights in their buckets, of which a share changes."""

    def __init__(self, shape: str, layers: int = 0) -> None:
        """`layers` replaces the shape's own number unless 0."""
        chosen = SHAPES[shape]
        tensors = (replace(chosen, layers=layers) if layers else chosen).tensors()
        self.specs = [TensorSpec(name, "bfloat16", size) for name, size in tensors]
        self.buckets = plan_buckets(self.specs, BUCKET_BYTES)
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self.data = [
            (torch.randn(bucket.num_bytes // 2) * 0.02).to(torch.bfloat16).view(torch.int16)
            for bucket in self.buckets
        ]

    def change(self, share: float) -> None:
        """Flips the lowest bit of this share of the elements."""
        for data in self.data:
            data[torch.rand(len(data)) < share] ^= 1

    def digests(self) -> list[bytes]:
        """Returns the digests of all buckets."""
        found = HostDigests(self.buckets)
        for place, data in enumerate(self.data):
            found.add(place, data.data_ptr())
        return [bucket_digest(tensors) for tensors in found.read()]


class Store:
    """The writing and the fetching side of one folder."""

    def __init__(self, weights: Weights, folder: Path) -> None:
        self.weights, self.folder = weights, folder
        self.storage = Storage(str(folder / "storage"))
        self.rank = RankObjects(
            weights.buckets, 0, self.storage, object_bytes=BUCKET_BYTES, pin=False
        )
        self.chain: list[weights_pb2.StoredLink] = []
        self.number = 0

    def write(self, *, whole: bool) -> tuple[weights_pb2.StoredWeights, int, Times]:
        """Writes a version; returns its manifest, its bytes, and the times of the writing."""
        self.number += 1
        folder, until = f"run/{self.number}", Until.after(LIMIT_S)
        for place, (bucket, data) in enumerate(
            zip(self.weights.buckets, self.weights.data, strict=True)
        ):
            self.rank.take(place, bucket, data.view(torch.uint8))()
        digests, started = self.weights.digests(), Clock()
        link = self.rank.write(folder, digests, whole=whole, until=until)
        self.chain = [link] if whole else [*self.chain, link]
        layout = layout_to_pb(self.weights.specs, BUCKET_BYTES)
        made = weights_pb2.StoredManifest(layout=layout, links=self.chain).SerializeToString()
        self.storage.write(f"{folder}/manifest", memoryview(made), until)
        times = started.read()
        digest = hashlib.blake2b(made, digest_size=32).digest()
        stored = weights_pb2.StoredWeights(
            key=f"{folder}/manifest", num_bytes=len(made), digest=digest
        )
        return stored, sum(each.num_bytes for each in link.objects), times

    def reader(self) -> StoredWeights:
        """Returns a server that has fetched nothing."""
        settings = WeightsSection(storage_url=self.storage.url, storage_deadline_s=LIMIT_S)
        return StoredWeights(settings, self.folder / "fetched")


def fetched(server: StoredWeights, stored: weights_pb2.StoredWeights) -> tuple[int, Times]:
    """Fetches a version; returns its bytes and the times."""
    started = Clock()
    return server.fetch(stored, threading.Event()).num_bytes, started.read()


def copied(folder: Path, num_bytes: int) -> tuple[Times, Times]:
    """Returns the times of writing so many bytes to a file and of reading them back."""
    data, path = bytes(num_bytes), folder / "plain"
    started = Clock()
    path.write_bytes(data)
    wrote, started = started.read(), Clock()
    path.read_bytes()
    return wrote, started.read()


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--links", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, tuple[int, list[Times], list[Times]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        weights, folder = Weights(arguments.shape), Path(name)
        store = Store(weights, folder)
        near = store.reader()
        for number in range(arguments.links + 1):
            stored, _, wrote = store.write(whole=not number)
            size, read = fetched(near, stored)
            kind = "changes" if number else "whole"
            _, writes, reads = found.get(kind, (0, [], []))
            found[kind] = size, [*writes, wrote], [*reads, read]
            progress(
                f"{kind}: {size} bytes, written in {wrote}, fetched in {read} (processor, clock)"
            )
            weights.change(arguments.share)
        size, read = fetched(store.reader(), stored)
        found["the chain, by a server that joins"] = size, [], [read]
        wrote, read = copied(folder, weights.num_bytes)
        found["limit: a plain file"] = weights.num_bytes, [wrote], [read]
    rows = [
        [what, f"{size / 1e6:,.1f}", seconds_of(writes), seconds_of(reads)]
        for what, (size, writes, reads) in found.items()
    ]
    lines = table(["a version", "MB", "written, s", "fetched and proved, s"], rows)
    print("\n".join(lines))
    write_result("storage", {"settings": settings_of(arguments), "found": found, "table": lines})
    return 0


def seconds_of(times: list[Times]) -> str:
    """Returns the processor's seconds as text."""
    return Spread.of([processor for processor, _ in times]).text(2) if times else ""


if __name__ == "__main__":
    sys.exit(main())
