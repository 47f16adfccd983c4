"""Versions in storage: the product's code on both sides, and a store that fails between them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from slipstream.extensions.stored_weights import server as stored_weights
from slipstream.extensions.stored_weights import storage
from slipstream.extensions.stored_weights import trainer as version_writer
from slipstream.extensions.stored_weights.controller import StoredPublisher
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb, plan_buckets
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.protocol.weights.publish_waits import Unanswered
from slipstream.v1 import trainer_pb2, weights_pb2

from simulation.blocking import THREADING, run_blocking, wait
from simulation.virtual_loop import PROCESS

if TYPE_CHECKING:
    from simulation.world import World

URL = "/simulated/storage"
SPECS = [TensorSpec(name, "bfloat16", (512,)) for name in "ab"]
LAYOUT = layout_to_pb(SPECS, 1024)
BUCKETS = tuple(plan_buckets(SPECS, 1024))
# Places at which the bytes of simulated weights lie among zeros, so that versions differ in few
# elements.
PLACES = (0, 100, 200, 300)
Content = list[np.ndarray]


def content_of(weights: bytes) -> Content:
    """All buckets of weights, which are 16 bytes in simulated runs."""
    content = [np.zeros(bucket.num_bytes, np.uint8) for bucket in BUCKETS]
    for data, elements in zip(
        content, np.frombuffer(weights, np.uint16).reshape(2, 4), strict=True
    ):
        data.view(np.uint16)[list(PLACES)] = elements
    return content


def weights_of(content: Content) -> bytes:
    """The weights that lie in the buckets, and others if anything else lies there."""
    weights = b"".join(data.view(np.uint16)[list(PLACES)].tobytes() for data in content)
    same = all(map(np.array_equal, content, content_of(weights)))
    return weights if same else hashlib.blake2b(b"".join(map(bytes, content))).digest()


def digests_of(content: Content) -> tuple[bytes, ...]:
    pairs = zip(BUCKETS, content, strict=True)
    return tuple(
        bucket_digest(bucket_tensor_digests(b, data.data)) for b, data in pairs
    )


def loaded(order: weights_pb2.PublishOrder) -> Content:
    """What an engine has after it loaded the file of an order."""
    data = np.fromfile(order.communicator.path, np.uint8)
    return np.split(data, [BUCKETS[0].num_bytes])


class Store:
    """Objects by key behind the interface of fsspec, and the faults of a seed."""

    protocol = "simulated"

    def __init__(self, world: World) -> None:
        self._world, self.random = world, random.Random(f"store/{world.seed}")
        self.objects: dict[str, bytes] = {}
        self._seen_s: dict[str, float] = {}
        # Manifests that a trainer reported before all of their version was there, with the cause.
        self._half: dict[str, str] = {}
        # Longest time of a call, and of a new object until all of it is there.
        self.delay_s = 0.2
        self.late_s = 0.0
        # Shares of the calls that fail, and of the reads that give something else.
        self.failing = 0.0
        self.torn = 0.0
        self.is_full = False

    def open(self, reader: Any, url: str) -> None:
        """Takes the place of `Storage.__init__`."""
        reader.url = url
        reader._files = self
        reader._root = "root"

    def on_thread(
        self, call: Callable[[], Any], limit_s: float, abandoned: Any, *, name: str
    ) -> Any:
        """Takes the place of `on_thread`: the call is made in the middle of a delay."""
        return wait(self._answer(call, limit_s, abandoned))

    async def _answer(
        self, call: Callable[[], Any], limit_s: float, abandoned: Any
    ) -> Any:
        loop = self._world.loop
        answer = loop.create_future()
        # A late answer is heard by nobody.
        answer.add_done_callback(
            lambda future: future.cancelled() or future.exception()
        )
        took_s = self.random.uniform(0.001, self.delay_s)
        loop.call_later(took_s / 2, loop._run_function, answer, took_s, call, ())
        given_up = loop.create_task(abandoned._event.wait())
        try:
            await asyncio.wait(
                {answer, given_up}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            given_up.cancel()
        if not answer.done():
            raise Unanswered
        return answer.result()

    def pipe_file(self, path: str, data: bytes) -> None:
        if self.is_full:
            self._put(path, data[: self.random.randint(0, len(data))])
            self._world.fired["full storage"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fail()
        self._put(path, data)
        # The answer may be lost.
        self._fail()

    def _put(self, path: str, data: bytes) -> None:
        self.objects[path] = data
        self._seen_s[path] = self._world.loop.now_s + self.random.uniform(
            0.0, self.late_s
        )

    def _fail(self) -> None:
        if self.random.random() < self.failing:
            self._world.fired["failing storage"] += 1
            raise OSError("the store has an internal error")

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        self._fail()
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = self.objects[path]
        if self._world.loop.now_s < self._seen_s[path]:
            self._world.fired["late storage"] += 1
            data = data[: self.random.randint(0, len(data) - 1)]
        elif self.random.random() < self.torn:
            self._world.fired["torn storage"] += 1
            place = self.random.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data[start:end]

    def find(self, folder: str) -> list[str]:
        self._fail()
        return [path for path in self.objects if path.startswith(f"{folder}/")]

    def rm_file(self, path: str) -> None:
        self._fail()
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)
        self._check_unread(path)

    def _check_unread(self, path: str) -> None:
        """A version stays while a server fetches it, unless the trainer was told to leave."""
        process = PROCESS.get()
        controller = self._world.controller
        if self._world.trainers[process.name].is_leaving or not hasattr(
            controller, "parts"
        ):
            return
        for part in controller.parts:
            fetches = (
                part._fetches.values() if isinstance(part, StoredPublisher) else ()
            )
            if any(path in self.named(report.stored) for report in fetches):
                self._world.violations.append(
                    f"{path} was removed while a server fetched it"
                )

    def named(self, stored: weights_pb2.StoredWeights) -> set[str]:
        """The manifest and all that it names."""
        data = self.objects.get(f"root/{stored.key}", b"")
        links = weights_pb2.StoredManifest.FromString(data).links
        keys = {
            stored.key,
            *(stored_object.key for link in links for stored_object in link.objects),
        }
        return {f"root/{key}" for key in keys}

    def check(self, report: trainer_pb2.StoredReport) -> None:
        """Notes a version that does not lie whole in the store when the controller hears of it.

        Nothing is wrong yet: a trainer whose place another one has taken, which removes what it
        wrote, may report it late, and the controller refuses the report.
        """
        stored = report.stored
        links: Sequence[Any] = ()
        if _is_whole(self.objects, stored):
            manifest = self.objects[f"root/{stored.key}"]
            links = weights_pb2.StoredManifest.FromString(manifest).links
        objects = [
            stored,
            *(stored_object for link in links for stored_object in link.objects),
        ]
        for stored_object in objects:
            if not links or not _is_whole(self.objects, stored_object):
                step = report.version.step
                cause = f"version {step} was announced without {stored_object.key}"
                self._half.setdefault(stored.key, cause)

    def announced(self, stored: weights_pb2.StoredWeights) -> None:
        """A version that a server hears of lay whole in the store when it was reported."""
        if cause := self._half.pop(stored.key, ""):
            self._world.violations.append(cause)

    def seams(self) -> list[tuple[Any, str, Any]]:
        return [
            (storage.Storage, "__init__", lambda reader, url: self.open(reader, url)),
            (storage, "on_thread", self.on_thread),
            (storage, "threading", THREADING),
            (stored_weights, "threading", THREADING),
            (stored_weights, "asyncio", SimpleNamespace(to_thread=run_blocking)),
            (version_writer, "threading", THREADING),
            (version_writer, "WHOLE_EVERY", 3),
        ]


def _is_whole(objects: dict[str, bytes], stored: Any) -> bool:
    data = objects.get(f"root/{stored.key}")
    return (
        data is not None
        and hashlib.blake2b(data, digest_size=32).digest() == stored.digest
    )


class Published:
    """Takes the place of a trainer's streams of weights."""

    def __init__(self, weights: Callable[[], bytes]) -> None:
        self._weights = weights
        self.weights = SimpleNamespace(buckets=BUCKETS, sender=0, senders=(0,))

    def run(self, take: Any) -> Any:
        content = content_of(self._weights())
        for place, (bucket, data) in enumerate(zip(BUCKETS, content, strict=True)):
            take(place, bucket, torch.from_numpy(data))
        return SimpleNamespace(buckets=digests_of(content))

    def layout(self, *, adapters_alone: bool) -> weights_pb2.WeightLayout:
        return LAYOUT

    def num_bytes(self, *, adapters_alone: bool) -> int:
        return sum(bucket.num_bytes for bucket in BUCKETS)


RANKS: Any = SimpleNamespace(
    is_main=True, broadcast_bytes=lambda data: data, device=SimpleNamespace(type="cpu")
)
