"""The digests of a pass, and the comparison with the export of Megatron-Bridge."""

from __future__ import annotations

import torch
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.weights.bucket_fill import Kind, exported
from slipstream.protocol.weights.buckets import ALIGNMENT_BYTES, Bucket, Span, TensorSpec
from slipstream.protocol.weights.digests import BucketDigests, HostDigests


def bridge_digests(policy: Policy, dtype: str, kind: Kind = Kind.MERGED) -> dict[str, bytes]:
    """Returns the digest by name of every tensor that Bridge exports. Collective."""
    found = {}
    for name, tensor in exported(policy, getattr(torch, dtype), kind):
        kind_of_element = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, kind_of_element, tuple(tensor.shape))
        bucket = Bucket((Span(spec, 0),), spec.num_bytes)
        digests = open_digests((bucket,), tensor.device)
        handle = torch.cuda.current_stream().cuda_stream if tensor.is_cuda else 0
        # A view into a parameter may begin anywhere.
        aligned = tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
        digests.add(0, aligned.data_ptr(), handle)
        found[name] = digests.read(handle)[0][0]
    return found


def open_digests(buckets: tuple[Bucket, ...], device: torch.device) -> BucketDigests:
    """Returns digests that are computed where the buckets lie."""
    if device.type != "cuda":
        return HostDigests(buckets)
    from slipstream.protocol.weights.cuda_digests import CudaDigests

    with torch.cuda.device(device):
        return CudaDigests(buckets)


def difference(ours: dict[str, bytes], exported: dict[str, bytes]) -> str:
    """Describes the first difference; "" when both are the same weights."""
    if missing := sorted(set(exported) ^ set(ours)):
        return f"{missing[0]} is in only one of the plan and Bridge's export"
    wrong = sorted(name for name, digest in exported.items() if ours[name] != digest)
    return f"the plan's {wrong[0]} differs from Bridge's export" if wrong else ""
