"""Buckets whose tensors lie each in one piece in live parameters, and are changed there.

A bucket is such when a plan copies each of its tensors whole to one contiguous stretch of a
parameter. Changed elements then go straight to the parameters, and digests are read from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from slipstream.protocol.weights.buckets import ALIGNMENT_BYTES, Bucket
from slipstream.protocol.weights.deltas import BLOCK_ELEMENTS, num_blocks, payload_parts
from slipstream.rollout_server.weights.copy_plan import CopyPlan, Parameters
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.protocol.weights.cuda_changes import CudaChanges

_ELEMENT = torch.int16


class LiveParts:
    """A bucket's tensors in the parameters; it holds views, so that their memory stays.

    `pointer` and `bucket` are what digests take: the lowest address, and spans counted from there.
    """

    def __init__(self, bucket: Bucket, views: list[Tensor], kernels: CudaChanges | None) -> None:
        """`views`: for each tensor of the bucket its 16-bit units; `kernels` on a GPU alone."""
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
        """Writes the changed elements of a payload; nothing outside the tensors is written."""
        first, second, _ = payload_parts(bucket, changed)
        counts = payload[:first].view(_ELEMENT)
        if self._kernels is None:
            self._put_on_host(payload, changed, places_of(payload, bucket, changed), first)
            return
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        self._kernels.put(
            (payload.data_ptr() + first, payload.data_ptr() + second),
            ends=ends.data_ptr(),
            changed=changed,
            num_blocks=self._num_blocks,
            targets=self._targets,
            stream=stream,
        )

    def _put_on_host(self, payload: Tensor, changed: int, places: Tensor, first: int) -> None:
        values = payload[first : first + _ELEMENT.itemsize * changed].view(_ELEMENT)
        for offset, view in zip(self._offsets, self._views, strict=True):
            within = places - offset // _ELEMENT.itemsize
            is_here = (within >= 0) & (within < len(view))
            view[within[is_here]] = values[is_here]


def places_of(payload: Tensor, bucket: Bucket, changed: int) -> Tensor:
    """Returns the numbers of a payload's elements in their bucket, int64 [changed]; never waits."""
    first, second, _ = payload_parts(bucket, changed)
    ends = payload[:first].view(_ELEMENT).to(torch.int64).cumsum(0)
    order = torch.arange(changed, device=payload.device)
    blocks = torch.searchsorted(ends, order, right=True).clamp_(max=len(ends) - 1)
    return blocks * BLOCK_ELEMENTS + payload[second : second + changed]


def live_parts(
    plan: CopyPlan, place: int, parameters: Parameters, kernels: CudaChanges | None
) -> LiveParts | None:
    """Returns the parts of bucket `place`; None when a tensor does not lie in one piece."""
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
