"""Digests on a GPU, with a cupy that is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slipstream.protocol import cuda_digests
from slipstream.protocol.buckets import TensorSpec, plan_buckets


class Kernel:
    """Remembers each launch: its blocks, and how many spans it was given."""

    launched: list[tuple[int, int]] = []

    def __init__(self, source: str, name: str) -> None:
        assert f" {name}(" in source

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        *_, first_blocks, num_spans, _ = arguments
        assert len(first_blocks) == num_spans + 1
        self.launched.append((grid[0], int(num_spans)))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    runtime = SimpleNamespace(
        getDevice=lambda: 0, getDeviceProperties=lambda _: {"multiProcessorCount": 132}
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    package = ModuleType("cupy")
    vars(package).update(
        RawKernel=Kernel,
        asarray=np.asarray,
        zeros=np.zeros,
        cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setattr(Kernel, "launched", [])
    cuda_digests._kernel.cache_clear()
    yield
    cuda_digests._kernel.cache_clear()


@pytest.mark.usefixtures("cupy")
def test_kernel_is_compiled_and_loaded_before_any_bucket_is_digested() -> None:
    buckets = plan_buckets([TensorSpec("a", "bfloat16", (9000,))], 1 << 20)
    cuda_digests.CudaDigests(buckets)
    # Without a span: nothing is read.
    assert Kernel.launched == [(1, 0)]
