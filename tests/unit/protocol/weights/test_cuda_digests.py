"""Digests on a GPU, with a cupy that is not there."""

import struct
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.cuda_digests import CudaDigests
from support.fakes import fake_cupy


def test_kernel_is_compiled_and_loaded_before_any_bucket_is_digested() -> None:
    buckets = plan_buckets([TensorSpec("a", "bfloat16", (9000,))], 1 << 20)
    with fake_cupy.installed() as cupy:
        CudaDigests(buckets)
        # Nothing is read.
        assert cupy.seen == ["digest 0 spans"]
        CudaDigests(buckets)
        assert cupy.seen == ["digest 0 spans"]


def test_sums_become_digests_of_each_buckets_tensors() -> None:
    tensors = [TensorSpec(name, "bfloat16", (9000,)) for name in "abc"]
    sums = np.array([[1, 2], [3, 1 << 63], [5, 6]], dtype=np.uint64)
    expected = [struct.pack("<QQ", *map(int, row)) for row in sums]
    with fake_cupy.installed() as cupy:
        digests = CudaDigests(plan_buckets(tensors, 40_000))

        def get(stream: object, out: npt.NDArray[np.uint64], *, blocking: bool) -> None:
            assert not blocking
            cupy.seen.append("copy")
            out[:] = sums

        digests._sums = SimpleNamespace(get=get)
        assert digests.read(7) == [expected[:2], expected[2:]]
        # An abort releases who waits for a stream, not surely who waits in a copy.
        assert cupy.seen[-2:] == ["copy", "wait for stream 7"]
