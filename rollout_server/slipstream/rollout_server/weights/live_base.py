"""The engine's own weights as the base of a delta: nothing is kept beside them.

A bucket whose tensors lie in one piece each is changed where it lies (`live_parts`). For any other
bucket a copy plan is read backwards: its parts are copied out of the live parameters into memory
for one bucket, the changed elements are put there, and the plan copies it back. A tensor parallel
worker holds only its shares of such a bucket. So digests are taken of shares, as sums that the
engine's process adds up (`share_digests`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.deltas import (
    BLOCK_ELEMENTS,
    ELEMENT_BYTES,
    num_blocks,
    on_the_wire,
    payload_parts,
    travels_whole,
)
from slipstream.rollout_server.weights.bucket_receiver import open_digests
from slipstream.rollout_server.weights.copy_plan import (
    CopyPlan,
    NotCopied,
    Parameters,
    Replay,
    View,
)
from slipstream.rollout_server.weights.live_parts import live_parts, places_of
from slipstream.rollout_server.weights.share_digests import Share
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.protocol.weights.cuda_changes import CudaChanges

_ELEMENT = torch.int16


class LiveBase:
    """Applies deltas to the parameters of a replay: `expect`, `take` each bucket, then `read`."""

    def __init__(
        self, plan: CopyPlan, replay: Replay, parameters: Parameters, device: torch.device
    ) -> None:
        """Raises NotCopied when a parameter has another element type than what is copied to it."""
        for copy in (copy for part in plan.copies for copy in part):
            if parameters[copy.parameter].dtype != copy.dtype:
                raise NotCopied(f"{copy.parameter} has another element type than its bucket")
            if any(not stride for stride in copy.source.strides):
                raise NotCopied(f"{copy.parameter} repeats an element of its bucket")
        self._buckets, self._replay, self._device = plan.buckets, replay, device
        views = [_views_by_tensor(plan, place) for place in range(len(plan.buckets))]
        self._holds_all = [
            sum(prod(view.shape) * size for parts in of_bucket for view, size in parts)
            == sum(span.tensor.num_bytes for span in bucket.spans)
            for bucket, of_bucket in zip(plan.buckets, views, strict=True)
        ]
        # Names of a bucket's shares, 8 bytes in hex for each tensor: equal where workers hold the
        # same share.
        self._names = ["".join(map(_name_of, of_bucket)) for of_bucket in views]
        kernels = _open_kernels(device)
        parts = [
            live_parts(plan, place, parameters, kernels) if replay.only_copies(place) else None
            for place in range(len(views))
        ]
        self._parts = parts
        self._digests = open_digests(
            tuple(
                bucket if of_bucket is None else of_bucket.bucket
                for bucket, of_bucket in zip(plan.buckets, parts, strict=True)
            ),
            device,
        )
        self._room: Tensor | None = None
        self._changed: Sequence[int] = ()

    @property
    def holds_all(self) -> bool:
        """Whether the worker holds all of each tensor."""
        return all(self._holds_all)

    def expect(self, changed: Sequence[int]) -> tuple[Bucket, ...]:
        """Takes the numbers of changed elements; returns the buckets as they will travel."""
        self._changed = changed
        return on_the_wire(self._buckets, changed)

    def prepare(self) -> None:
        """Allocates the memory of one bucket and cuts its views."""
        for place, parts in enumerate(self._parts):
            if parts is None or travels_whole(self._buckets[place], self._changed[place]):
                self._replay.prepare(place, self._bucket(place))

    def take(self, place: int, payload: Tensor) -> None:
        """Applies the payload of a bucket, or the whole bucket, on the current stream.

        Whatever the payload holds, nothing outside the bucket is written.
        """
        bucket, changed, parts = self._buckets[place], self._changed[place], self._parts[place]
        is_whole = travels_whole(bucket, changed)
        if parts is not None and not is_whole:
            # Over gloo it lies in main memory.
            parts.put(payload.to(self._device), bucket, changed, self._handle)
            self._digests.add(place, parts.pointer, self._handle)
            return
        room = self._bucket(place)
        if is_whole:
            room.copy_(payload)
        else:
            self._collect(place)
            put_changes(payload.to(self._device), bucket, changed, self._elements(place))
        self._replay.run(place, room)
        if not self._holds_all[place]:
            # Elements of other workers' shares were put there too.
            self._collect(place)
        self._digests.add(place, self._where(place), self._handle)

    def read(self) -> list[Share]:
        """Returns the worker's share of each bucket; waits for the current stream."""
        found = [b"".join(tensors).hex() for tensors in self._digests.read(self._handle)]
        return list(zip(found, self._names, strict=True))

    def read_unchanged(self) -> list[Share]:
        """Returns what `read` returns after a delta without changes; keeps no memory."""
        for place, parts in enumerate(self._parts):
            if parts is None:
                self._collect(place)
            self._digests.add(place, self._where(place), self._handle)
        found = self.read()
        self._replay.forget_buffers()
        self._room = None
        return found

    def _where(self, place: int) -> int:
        parts = self._parts[place]
        return self._bucket(place).data_ptr() if parts is None else parts.pointer

    def _collect(self, place: int) -> None:
        if not self._holds_all[place]:
            self._bucket(place).zero_()
        self._replay.collect(place, self._bucket(place))

    def _bucket(self, place: int) -> Tensor:
        return self._memory()[: self._buckets[place].num_bytes]

    def _elements(self, place: int) -> Tensor:
        size = num_blocks(self._buckets[place]) * BLOCK_ELEMENTS * ELEMENT_BYTES
        return self._memory()[:size].view(_ELEMENT)

    def _memory(self) -> Tensor:
        if self._room is None:
            # Room for whole blocks: every place that a payload can name is inside it.
            blocks = max(map(num_blocks, self._buckets))
            size = blocks * BLOCK_ELEMENTS * ELEMENT_BYTES
            self._room = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._room

    @property
    def _handle(self) -> int:
        is_gpu = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if is_gpu else 0


def _open_kernels(device: torch.device) -> CudaChanges | None:
    if device.type != "cuda":
        return None
    from slipstream.protocol.weights.cuda_changes import CudaChanges

    with torch.cuda.device(device):
        return CudaChanges()


def put_changes(payload: Tensor, bucket: Bucket, changed: int, elements: Tensor) -> None:
    """Writes the changed elements of a payload to their places; waits for nothing.

    `elements` covers whole blocks. A payload of undefined bytes, as after an abort, names no place
    outside of them.
    """
    first, second, _ = payload_parts(bucket, changed)
    places = places_of(payload, bucket, changed)
    elements[places] = payload[first:second].view(_ELEMENT)


def _views_by_tensor(plan: CopyPlan, place: int) -> list[set[tuple[View, int]]]:
    """Returns the parts of each tensor that the plan copies, and the size of their elements."""
    starts = [span.offset_bytes for span in plan.buckets[place].spans]
    found: list[set[tuple[View, int]]] = [set() for _ in starts]
    for copy in plan.copies[place]:
        tensor = bisect.bisect_right(starts, copy.source.offset * copy.dtype.itemsize) - 1
        found[tensor].add((copy.source, copy.dtype.itemsize))
    return found


def _name_of(parts: set[tuple[View, int]]) -> str:
    described = sorted((view.offset, view.shape, view.strides) for view, _ in parts)
    return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
