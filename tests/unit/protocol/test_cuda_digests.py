"""Digests on a GPU, with a cupy that is not there."""

from __future__ import annotations

import fake_cupy
from slipstream.protocol.buckets import TensorSpec, plan_buckets
from slipstream.protocol.cuda_digests import CudaDigests


def test_kernel_is_compiled_and_loaded_before_any_bucket_is_digested() -> None:
    buckets = plan_buckets([TensorSpec("a", "bfloat16", (9000,))], 1 << 20)
    with fake_cupy.installed() as cupy:
        CudaDigests(buckets)
        # Nothing is read.
        assert cupy.seen == ["digest 0 spans"]
        CudaDigests(buckets)
        assert cupy.seen == ["digest 0 spans"]
