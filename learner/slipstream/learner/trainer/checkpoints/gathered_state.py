"""State of the distributed optimizer, gathered from device to device by the rank that saves it.

Megatron's own method gathers through main memory and leaves the whole state on every rank. Here the
first data-parallel rank receives the state on its device in small parts, and copies them into the
memory of the save. Import it after `cpu.install`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")

# A tensor's place in a rank's share of a bucket: begin, end, tensor.
_Place = tuple[int, int, Tensor]


@contextmanager
def gathering(optimizer: Megatron, host: HostCopies) -> Iterator[None]:
    """Replaces Megatron's method to gather saved state until the block ends."""
    parts = distributed_parts(optimizer)
    # Megatron calls `gc.collect` at the end, which is fast because it skips frozen objects.
    gc.freeze()
    for part in parts:
        part.get_parameter_state_dp_zero = functools.partial(_gather, part, host)
    try:
        yield
    finally:
        gc.unfreeze()
        for part in parts:
            del part.get_parameter_state_dp_zero


def distributed_parts(optimizer: Megatron) -> list[Megatron]:
    """Returns the parts whose state is split over data-parallel ranks."""
    return [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]


def gathered_sizes(optimizer: Megatron) -> list[int]:
    """Returns the bytes of each tensor that this rank gathers; not collective."""
    return [
        4 * buffer.numel
        for part in distributed_parts(optimizer)
        if part.data_parallel_group.rank() == 0
        for buffer in part.buffers
        for _ in KEYS
    ]


def _gather(part: Megatron, host: HostCopies, **_: object) -> dict[Any, Any] | None:
    """Replaces `DistributedOptimizer.get_parameter_state_dp_zero`; None but on the first rank."""
    group = part.data_parallel_group
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, ((dtype, ranges),) in enumerate(maps.items() for maps in part.gbuf_ranges):
        buffer = part.buffers[number]
        # Megatron looks for parameters at their places in the buffer, padding of buckets included.
        whole: dict[str, Any] = {}
        if group.rank() == 0:
            whole = {key: host.empty(buffer.numel, torch.float32) for key in KEYS}
        for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
            end = bucket.offset + bucket.grad_data.numel()
            places = _places(part, bucket_ranges["param_map"])
            for key in KEYS:
                target = whole[key][bucket.offset : end] if whole else None
                _gather_bucket(places[key], bucket.grad_data, target, group, host.part_elements)
        state[number] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
    host.wait()
    return state if group.rank() == 0 else None


def _places(part: Megatron, ranges: dict[Any, Any]) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {key: [] for key in KEYS}
    for parameter, its in ranges.items():
        tensors = part._get_main_param_and_optimizer_states(parameter)
        begin, end = its["gbuf_local"].start, its["gbuf_local"].end
        for key in KEYS:
            found[key].append((begin, end, tensors[key].detach().reshape(-1)))
    return found


def _gather_bucket(
    places: list[_Place],
    gradients: Tensor,
    target: Tensor | None,
    group: dist.ProcessGroup,
    part_elements: int,
) -> None:
    """Gathers all ranks' shares of a bucket into `target` on the first rank; collective."""
    size, share = group.size(), gradients.numel() // group.size()
    part = max(1, min(share, part_elements // size))
    own = torch.empty(part, dtype=torch.float32, device=gradients.device)
    for begin in range(0, share, part):
        end = min(begin + part, share)
        _fill(own[: end - begin], begin, places)
        received = _received(own[: end - begin], group)
        if target is not None:
            for rank, values in enumerate(received):
                start = rank * share + begin
                target[start : start + end - begin].copy_(values, non_blocking=True)


def _fill(own: Tensor, start: int, places: list[_Place]) -> None:
    for begin, end, tensor in places:
        first, last = max(begin, start), min(end, start + own.numel())
        if first < last:
            own[first - start : last - start].copy_(tensor[first - begin : last - begin])


def _received(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns each rank's values on the first rank, [] on the others; collective."""
    if group.size() == 1:
        return [own]
    received = None
    if group.rank() == 0:
        received = list(torch.empty(group.size(), own.numel(), device=own.device).unbind())
    dist.gather(own, received, dst=dist.get_global_rank(group, 0), group=group)
    return received or []


def drop_absent(state: dict[Any, Any]) -> None:
    """Drops state that another rank gathers: Megatron would warn about differing ranks."""
    parts = [state, *(part for part in state.values() if isinstance(part, dict))]
    for part in parts:
        if part.get("param_state", state) is None:
            del part["param_state"]


def detach(state: dict[str, Any]) -> None:
    """Copies the tensors of a sharded state; the optimizer must have found its own before."""
    for part in nested_values(state):
        is_tensor = isinstance(part, (ShardedTensor, ShardedTensorFactory))
        if is_tensor and part.data is not None:
            part.data = part.data.detach().clone()
