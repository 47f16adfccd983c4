"""The engine's own weights as the base of a delta, so that no copy of them is needed.

`LiveParts` applies deltas in place to a bucket whose tensors are contiguous in the live parameters.
For any other bucket a copy plan is run backwards: the bucket is gathered from the live parameters
into a buffer, the changed elements are written there, and the plan copies it back. A tensor
parallel worker holds only its shards of such a bucket: it computes sums over these shards, from
which the server computes the digests of whole buckets (`whole_digests`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from slipstream.protocol.weights.buckets import ALIGNMENT_BYTES, Bucket
from slipstream.protocol.weights.deltas import (
    BLOCK_ELEMENTS,
    ELEMENT_BYTES,
    num_blocks,
    on_the_wire,
    payload_parts,
    travels_whole,
)
from slipstream.protocol.weights.digests import bucket_digest
from slipstream.rollout_server.weights.bucket_receiver import open_digests, stream_handle
from slipstream.rollout_server.weights.copy_plan import (
    CopyPlan,
    NotCopied,
    Parameters,
    Replay,
    View,
)
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.protocol.weights.cuda_changes import CudaChanges

# The two sums of a tensor's digest.
_SUMS = 2

Numbers = npt.NDArray[np.uint64]
# One worker's share of a bucket, in hex: for each tensor the 16 bytes of its sums, and 8 bytes that
# name the part of the tensor that the worker holds.
Share: TypeAlias = tuple[str, str]

_ELEMENT = torch.int16


class LiveBase:
    """Applies deltas to the live parameters: call `expect`, `take` for each bucket, then `read`."""

    def __init__(
        self, plan: CopyPlan, replay: Replay, parameters: Parameters, device: torch.device
    ) -> None:
        """`replay` carries out `plan`, which copies buckets to `parameters`.

        Raises NotCopied if a copy converts element types or repeats an element.
        """
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
        kernels: CudaChanges | None = None
        if device.type == "cuda":
            from slipstream.protocol.weights.cuda_changes import CudaChanges

            with torch.cuda.device(device):
                kernels = CudaChanges()
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
        """Whether the worker holds every tensor whole, not only a shard."""
        return all(self._holds_all)

    def expect(self, changed: Sequence[int]) -> tuple[Bucket, ...]:
        """Takes the sizes of a delta; returns the buckets with the numbers of bytes to arrive.

        `changed` has the number of changed elements of each bucket.
        """
        self._changed = changed
        return on_the_wire(self._buckets, changed)

    def prepare(self) -> None:
        """Allocates a buffer for one bucket, if any bucket needs it, and prepares views into it."""
        for place, parts in enumerate(self._parts):
            if parts is None or travels_whole(self._buckets[place], self._changed[place]):
                self._replay.prepare(place, self._bucket(place))

    def take(self, place: int, payload: Tensor) -> None:
        """Applies the payload of a bucket, or a whole bucket, on the current stream.

        Nothing outside the bucket is written, whatever the payload contains.
        """
        bucket, changed, parts = self._buckets[place], self._changed[place], self._parts[place]
        is_whole, handle = travels_whole(bucket, changed), stream_handle(self._device)
        if parts is not None and not is_whole:
            # Over gloo, the payload is in main memory.
            parts.put(payload.to(self._device), bucket, changed, handle)
            self._digests.add(place, parts.pointer, handle)
            return
        room = self._bucket(place)
        if is_whole:
            room.copy_(payload)
        else:
            self._collect(place)
            size = num_blocks(bucket) * BLOCK_ELEMENTS * ELEMENT_BYTES
            elements = self._memory()[:size].view(_ELEMENT)
            put_changes(payload.to(self._device), bucket, changed, elements)
        self._replay.run(place, room)
        if not self._holds_all[place]:
            # Elements of other workers' shares were put there too.
            self._collect(place)
        self._digests.add(place, self._where(place), handle)

    def read(self) -> list[Share]:
        """Returns the digest sums and shard names of each bucket; waits for the current stream."""
        sums = self._digests.read(stream_handle(self._device))
        found = [b"".join(tensors).hex() for tensors in sums]
        return list(zip(found, self._names, strict=True))

    def read_unchanged(self) -> list[Share]:
        """Returns the result of `read` for a delta without changes, and frees the buffers."""
        for place, parts in enumerate(self._parts):
            if parts is None:
                self._collect(place)
            self._digests.add(place, self._where(place), stream_handle(self._device))
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

    def _memory(self) -> Tensor:
        if self._room is None:
            # Room for whole blocks: every place that a payload can name is inside it.
            blocks = max(map(num_blocks, self._buckets))
            size = blocks * BLOCK_ELEMENTS * ELEMENT_BYTES
            self._room = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._room


def put_changes(payload: Tensor, bucket: Bucket, changed: int, elements: Tensor) -> None:
    """Writes a payload's changed elements to their places in `elements`; never synchronises.

    `elements` covers whole blocks. A payload of undefined bytes, as after an abort, cannot cause a
    write outside of them.
    """
    first, second, _ = payload_parts(bucket, changed)
    places = places_of(payload, bucket, changed)
    elements[places] = payload[first:second].view(_ELEMENT)


def _views_by_tensor(plan: CopyPlan, place: int) -> list[set[tuple[View, int]]]:
    """Returns, for each tensor of a bucket, the views that the plan reads, with element sizes."""
    starts = [span.offset_bytes for span in plan.buckets[place].spans]
    found: list[set[tuple[View, int]]] = [set() for _ in starts]
    for copy in plan.copies[place]:
        tensor = bisect.bisect_right(starts, copy.source.offset * copy.dtype.itemsize) - 1
        found[tensor].add((copy.source, copy.dtype.itemsize))
    return found


def _name_of(parts: set[tuple[View, int]]) -> str:
    described = sorted((view.offset, view.shape, view.strides) for view, _ in parts)
    return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()


class LiveParts:
    """Views of a bucket's tensors inside the live parameters.

    Digests are computed from `pointer`, the lowest address of the views, and `bucket`, whose
    offsets count from `pointer`.
    """

    def __init__(self, bucket: Bucket, views: list[Tensor], kernels: CudaChanges | None) -> None:
        """`views` has each tensor as a view of int16; only a GPU needs `kernels`."""
        addresses = [view.data_ptr() for view in views]
        self._views, self._kernels = views, kernels
        self._offsets = [span.offset_bytes for span in bucket.spans]
        self._num_blocks = num_blocks(bucket)
        self.pointer = min(addresses)
        spans = tuple(
            replace(span, offset_bytes=address - self.pointer)
            for span, address in zip(bucket.spans, addresses, strict=True)
        )
        end = max(span.offset_bytes + span.tensor.num_bytes for span in spans)
        self.bucket = replace(bucket, spans=spans, num_bytes=end)
        if kernels is not None:
            from slipstream.protocol.weights.cuda_changes import Targets

            sizes = [span.tensor.num_bytes for span in bucket.spans]
            self._targets = Targets(self._offsets, sizes, addresses)

    def put(self, payload: Tensor, bucket: Bucket, changed: int, stream: int) -> None:
        """Writes the changed elements of `payload` to the views, and nothing outside of them.

        `changed` is the number of these elements. A GPU does the work on `stream`, a CUDA handle.
        """
        first, second, _ = payload_parts(bucket, changed)
        if self._kernels is None:
            places = places_of(payload, bucket, changed)
            values = payload[first:second].view(_ELEMENT)
            for offset, view in zip(self._offsets, self._views, strict=True):
                within = places - offset // _ELEMENT.itemsize
                is_here = (within >= 0) & (within < len(view))
                view[within[is_here]] = values[is_here]
            return
        ends = torch.cumsum(payload[:first].view(_ELEMENT), 0, dtype=torch.int32)
        self._kernels.put(
            (payload.data_ptr() + first, payload.data_ptr() + second),
            ends=ends.data_ptr(),
            changed=changed,
            num_blocks=self._num_blocks,
            targets=self._targets,
            stream=stream,
        )


def live_parts(
    plan: CopyPlan, place: int, parameters: Parameters, kernels: CudaChanges | None
) -> LiveParts | None:
    """Returns the parts of bucket `place`, or None if a tensor is not contiguous and aligned."""
    bucket = plan.buckets[place]
    by_start: dict[int, Tensor] = {}
    for copy in plan.copies[place]:
        view = copy.destination.within(parameters[copy.parameter].data)
        starts = copy.source.offset * copy.dtype.itemsize
        source = torch.empty_strided(copy.source.shape, copy.source.strides, device="meta")
        is_plain = view.is_contiguous() and source.is_contiguous()
        is_aligned = view.data_ptr() % ALIGNMENT_BYTES == 0
        is_cut = copy.dtype.itemsize % _ELEMENT.itemsize != 0
        if not (is_plain and is_aligned) or is_cut or starts in by_start:
            return None
        by_start[starts] = view.view(-1).view(_ELEMENT)
    views = [by_start.pop(span.offset_bytes, None) for span in bucket.spans]
    whole = [
        view
        for view, span in zip(views, bucket.spans, strict=True)
        if view is not None and view.numel() * _ELEMENT.itemsize == span.tensor.num_bytes
    ]
    return None if by_start or len(whole) < len(views) else LiveParts(bucket, whole, kernels)


def places_of(payload: Tensor, bucket: Bucket, changed: int) -> Tensor:
    """Returns each changed element's index in its bucket, int64 [changed]; never synchronises."""
    first, second, _ = payload_parts(bucket, changed)
    ends = payload[:first].view(_ELEMENT).to(torch.int64).cumsum(0)
    order = torch.arange(changed, device=payload.device)
    blocks = torch.searchsorted(ends, order, right=True).clamp_(max=len(ends) - 1)
    return blocks * BLOCK_ELEMENTS + payload[second : second + changed]


def whole_digests(workers: Sequence[Sequence[Share]]) -> list[bytes]:
    """Returns the digest of each bucket, from each worker's shares of all buckets.

    A tensor's digest is a sum over its words, so the sums of its shares add up to it. A share that
    several workers hold counts once; shares that overlap in part give a wrong digest.
    """
    return [_whole_digest(shares) for shares in zip(*workers, strict=True)]


def _whole_digest(shares: Sequence[Share]) -> bytes:
    total, seen = np.zeros((), np.uint64), list[Numbers]()
    for in_hex, named in shares:
        names, sums = _numbers(named), _numbers(in_hex).reshape(-1, _SUMS)
        is_new = np.all([np.ones(len(names), bool), *(names != other for other in seen)], axis=0)
        total = total + np.where(is_new[:, None], sums, np.uint64(0))
        seen.append(names)
    return bucket_digest(row.tobytes() for row in total)


def _numbers(text: str) -> Numbers:
    return np.frombuffer(bytes.fromhex(text), dtype="<u8")
