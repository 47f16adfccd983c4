"""What a bucket's bytes changed since they were kept, found and encoded by kernels on a GPU.

Nothing waits while a bucket is compared: `number` waits for the count alone, when the caller has
enqueued other work behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.cuda_changes import MASK_BYTES, CudaChanges, Targets
from slipstream.protocol.weights.deltas import num_blocks, payload_parts
from torch import Tensor


class CudaMarks:
    """The marks of one bucket at a time: `mark`, `number`, `write`; all on the current stream."""

    def __init__(
        self, buckets: Sequence[Bucket], kept: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """`kept`: the bytes of the own buckets as they were published last, on `device`."""
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
        """Compares bucket `place` with what was kept of it."""
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
        """Returns the number of elements that the last `mark` found; waits for it."""
        self._counted.synchronize()
        return int(self._number)

    def write(self, place: int, data: Tensor, changed: int) -> Tensor:
        """Returns the payload of the bucket that was marked last, with its `changed` elements."""
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
        """Puts the elements of a payload into what was kept of bucket `place`."""
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
