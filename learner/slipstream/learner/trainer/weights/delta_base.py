"""The weights that a sending rank published last, and their changes since.

Consumes: filled buckets. Produces: numbers of changed elements, and payloads with these elements
(`protocol.weights.deltas` describes their form). On CUDA all work is enqueued on the current
stream. `DeltaBase.count`, `counts`, `encode` and `finish` may wait until the GPU has counted the
changed elements; the other methods of `DeltaBase` never wait.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from slipstream.core.errors import RunFailed
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.cuda_changes import MASK_BYTES, CudaChanges, Targets
from slipstream.protocol.weights.deltas import (
    BLOCK_ELEMENTS,
    ELEMENT_BYTES,
    content_name,
    gap_bytes,
    num_blocks,
    payload_parts,
    travels_whole,
)
from slipstream.v1 import weights_pb2
from torch import Tensor


class CudaMarks:
    """Finds a bucket's changed elements on a GPU: call `mark`, then `number`, then `write`."""

    def __init__(
        self, buckets: Sequence[Bucket], kept: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """Allocates the marks; `kept` has this rank's last published buckets, by bucket number."""
        blocks = max((num_blocks(buckets[place]) for place in kept), default=1)
        self._buckets, self._kept, self._device = buckets, kept, device
        self._masks = torch.empty(blocks * MASK_BYTES, dtype=torch.uint8, device=device)
        self._counts = torch.empty(blocks, dtype=torch.int16, device=device)
        self._ends = torch.empty(blocks, dtype=torch.int32, device=device)
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._counted = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._kernels = CudaChanges()
            self._targets = {
                place: Targets([0], [data.numel()], [data.data_ptr()])
                for place, data in kept.items()
            }

    def mark(self, place: int, data: Tensor) -> None:
        """Compares bucket `place` with its last published bytes, and marks the changed elements."""
        blocks = num_blocks(self._buckets[place])
        self._kernels.mark(
            data.data_ptr(),
            self._kept[place].data_ptr(),
            num_bytes=data.numel(),
            masks=self._masks.data_ptr(),
            counts=self._counts.data_ptr(),
            stream=self._stream,
        )
        ends = self._ends[:blocks]
        torch.cumsum(self._counts[:blocks], 0, dtype=torch.int32, out=ends)
        self._number.copy_(ends[-1:], non_blocking=True)
        self._counted.record()

    def number(self) -> int:
        """Waits for the last `mark`, and returns the number of changed elements that it found."""
        self._counted.synchronize()
        return int(self._number)

    def write(self, place: int, data: Tensor, changed: int) -> Tensor:
        """Returns the delta payload of bucket `place`, which must be the last marked one.

        `data`: the bucket's bytes. `changed`: the number of its changed elements.
        """
        bucket = self._buckets[place]
        blocks = num_blocks(bucket)
        first, second, end = payload_parts(bucket, changed)
        payload = torch.empty(end, dtype=torch.uint8, device=self._device)
        payload[:first].view(torch.int16).copy_(self._counts[:blocks])
        payload[second + changed :].zero_()
        self._kernels.write(
            data.data_ptr(),
            self._masks.data_ptr(),
            ends=self._ends.data_ptr(),
            num_blocks=blocks,
            payload=(payload.data_ptr() + first, payload.data_ptr() + second),
            stream=self._stream,
        )
        return payload

    def put(self, place: int, payload: Tensor, changed: int) -> None:
        """Writes a payload's elements into the kept bytes of bucket `place`."""
        blocks = num_blocks(self._buckets[place])
        first, second, _ = payload_parts(self._buckets[place], changed)
        ends = self._ends[:blocks]
        torch.cumsum(payload[:first].view(torch.int16), 0, dtype=torch.int32, out=ends)
        self._kernels.put(
            (payload.data_ptr() + first, payload.data_ptr() + second),
            ends=ends.data_ptr(),
            changed=changed,
            num_blocks=blocks,
            targets=self._targets[place],
            stream=self._stream,
        )

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


logger = logging.getLogger(__name__)

_ELEMENT = torch.int16
# Largest payload, as a share of its bucket, that is encoded before a publish needs it; this bounds
# the memory of payloads.
_EARLY_SHARE = 0.125


class DeltaBase:
    """Keeps a copy (the base) of a rank's own buckets as last published, and finds changes since.

    The base takes as much memory as the buckets. In a pass, call for each own bucket `count` if it
    is not sent, `encode` if its changes are sent, or `keep` if it is sent whole; then call `counts`
    and `settle`. With `encodes_early`, `count` also encodes small payloads, which `take_early`
    returns, so that a publish can begin with them. After `count`, the bucket's bytes must not
    change until the next call of `count`, `counts` or `finish`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        own: Sequence[bool],
        device: torch.device,
        *,
        on_host: bool,
        encodes_early: bool = False,
    ) -> None:
        """Allocates memory for the buckets whose `own` is true, on the host or the device."""
        self._encodes_early = encodes_early
        # Payloads that the last counting pass encoded, kept until the next one because they may
        # still be sent; and whether the last pass was a counting pass.
        self._early: dict[int, Tensor] = {}
        self._is_counted = False
        self._buckets = buckets
        self._on_host = on_host and device.type == "cuda"
        where = torch.device("cpu") if self._on_host else device
        self._kept = {
            place: torch.zeros(
                bucket.num_bytes, dtype=torch.uint8, device=where, pin_memory=self._on_host
            )
            for place, bucket in enumerate(buckets)
            if own[place]
        }
        largest = max((kept.numel() for kept in self._kept.values()), default=0)
        # Device memory for one bucket of a base in main memory.
        self._room = torch.empty(largest if self._on_host else 0, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(len(buckets), dtype=torch.int64, device=device)
        # Name of the base's content, b"" before the first pass that sends, and the number of each
        # bucket's elements that have changed since.
        self._name, self._changed = b"", tuple[int, ...]()
        self._gaps = {
            place: torch.from_numpy(gap_bytes(buckets[place])).to(device) for place in self._kept
        }
        # Kernels for early payloads on a GPU, and the bucket that they have marked.
        self._marks: CudaMarks | None = None
        self._marked: tuple[int, Tensor] | None = None
        if encodes_early and device.type == "cuda":
            self._marks = CudaMarks(buckets, self._kept, device)
        if self._kept:
            logger.info(
                "%.2f GB of published weights are kept %s",
                sum(kept.numel() for kept in self._kept.values()) / 1e9,
                "in main memory" if where.type == "cpu" else "on the GPU",
            )

    @property
    def offer(self) -> weights_pb2.Delta | None:
        """The changes from the base to the last pass's weights, as numbers of changed elements.

        It is None without a base, or if a delta would save nothing.
        """
        if not self._name or all(map(travels_whole, self._buckets, self._changed)):
            return None
        return weights_pb2.Delta(base=self._name, changed=self._changed)

    @property
    def changed_share(self) -> float:
        """The fraction of elements by which the weights of the last pass differ from the base."""
        return sum(self._changed) * ELEMENT_BYTES / sum(b.num_bytes for b in self._buckets)

    def settle(self, changed: Sequence[int], sent: Sequence[bytes] = ()) -> None:
        """Ends a pass; `changed` has the number of changed elements of each bucket over all ranks.

        `sent` has the bucket digests of a pass that sent the weights; it is empty otherwise.
        """
        self._changed, self._is_counted = tuple(changed), not sent
        self._name = content_name(sent) or self._name

    def count(self, place: int, data: Tensor) -> None:
        """Counts the elements of bucket `place`, whose bytes are `data`, that differ from the base.

        Sets the padding between tensors in `data` to 0.
        """
        self._early.pop(place, None)
        if not self._name:
            return
        self._clear_gaps(place, data)
        if self._marks is not None:
            self.finish()
            self._marks.mark(place, data)
            self._marked = place, data
            return
        differ = data.view(_ELEMENT) != self._base(place).view(_ELEMENT)
        if not self._encodes_early:
            self._counts[place] = torch.count_nonzero(differ)
            return
        where = differ.nonzero().flatten()
        self._counts[place] = len(where)
        if self._is_small(place, len(where)):
            _, _, end = payload_parts(self._buckets[place], len(where))
            payload = torch.empty(end, dtype=torch.uint8, device=data.device)
            self._write(place, data, where, payload)
            self._early[place] = payload

    def finish(self) -> None:
        """Completes the last `count` if it ran on a GPU, where it only marks the changes.

        Waits until the GPU has counted the changes, and encodes them if the payload is small.
        """
        if self._marks is None or self._marked is None:
            return
        (place, data), self._marked = self._marked, None
        changed = self._marks.number()
        self._counts[place] = changed
        if self._is_small(place, changed):
            self._early[place] = self._marks.write(place, data, changed)

    def counts(self) -> list[int]:
        """Returns the number of changed elements of each bucket; 0 for other ranks' buckets."""
        self.finish()
        found: list[int] = self._counts.tolist()
        return found

    def has_early(self, place: int) -> bool:
        """Whether the last pass encoded the changes of bucket `place`; the same on every rank."""
        is_small = self._is_small(place, self._changed[place])
        return self._encodes_early and self._is_counted and is_small

    def take_early(self, place: int) -> Tensor:
        """Returns the early payload of bucket `place` of this rank, and applies it to the base.

        The payload stays valid until the next pass.
        """
        payload, changed = self._early[place], self._changed[place]
        if self._marks is not None:
            self._marks.put(place, payload, changed)
        else:
            self._put(place, payload, changed)
        self._counts[place] = 0
        return payload

    def _put(self, place: int, payload: Tensor, changed: int) -> None:
        first, second, _ = payload_parts(self._buckets[place], changed)
        per_block = payload[:first].view(_ELEMENT).to(torch.int64)
        blocks = torch.arange(len(per_block), device=payload.device)
        blocks = torch.repeat_interleave(blocks, per_block, output_size=changed)
        places = blocks * BLOCK_ELEMENTS + payload[second : second + changed]
        self._kept[place].view(_ELEMENT)[places] = payload[first:second].view(_ELEMENT)

    def keep(self, place: int, data: Tensor) -> None:
        """Stores `data`, the bytes of bucket `place`, as its new base."""
        self._clear_gaps(place, data)
        self._kept[place].copy_(data, non_blocking=True)
        self._counts[place] = 0

    def encode(self, place: int, data: Tensor) -> None:
        """Stores `data` as bucket `place`'s new base, then overwrites `data` with the payload.

        Raises RunFailed unless as many elements differ as the last pass counted.
        """
        changed = self._changed[place]
        self._clear_gaps(place, data)
        elements = data.view(_ELEMENT)
        where = (elements != self._base(place).view(_ELEMENT)).nonzero().flatten()
        if len(where) != changed:
            raise RunFailed(
                f"bucket {place} has {len(where)} changed elements where {changed} were counted: "
                "the weights changed between a step and its publish"
            )
        self._kept[place].copy_(data, non_blocking=True)
        self._write(place, data, where, data)
        self._counts[place] = 0

    def _write(self, place: int, data: Tensor, where: Tensor, payload: Tensor) -> None:
        """Writes the elements of `data` at `where` into `payload`, which may share its memory."""
        bucket, changed = self._buckets[place], len(where)
        values = data.view(_ELEMENT)[where]
        bounds = torch.arange(num_blocks(bucket) + 1, device=data.device) * BLOCK_ELEMENTS
        per_block = torch.searchsorted(where, bounds).diff().to(_ELEMENT)
        first, second, end = payload_parts(bucket, changed)
        payload[:first].view(_ELEMENT).copy_(per_block)
        payload[first:second].view(_ELEMENT).copy_(values)
        payload[second : second + changed].copy_((where % BLOCK_ELEMENTS).to(torch.uint8))
        payload[second + changed : end].zero_()

    def _is_small(self, place: int, changed: int) -> bool:
        """Whether a payload of `changed` elements is small enough to be encoded early."""
        bucket = self._buckets[place]
        return payload_parts(bucket, changed)[2] <= bucket.num_bytes * _EARLY_SHARE

    def _base(self, place: int) -> Tensor:
        kept = self._kept[place]
        if not self._on_host:
            return kept
        room = self._room[: kept.numel()]
        room.copy_(kept, non_blocking=True)
        return room

    def _clear_gaps(self, place: int, data: Tensor) -> None:
        gaps = self._gaps[place]
        if len(gaps):
            data.index_fill_(0, gaps, 0)
