"""CUDA kernels that find, encode and apply the changed elements of a bucket; see `deltas`.

Kernels work on blocks of 256 elements: `mark` and `write` use a warp per block, `put` a thread.
They need cupy, which compiles them at their first use and keeps them on disk, but no torch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from slipstream.protocol.weights.deltas import BLOCK_ELEMENTS, ELEMENT_BYTES

_THREADS = 256
_WARP = 32
_GRIDS_PER_PROCESSOR = 8
# Bytes of the masks of a block: a bit for each element.
MASK_BYTES = BLOCK_ELEMENTS // 8

_SOURCE = r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

__device__ __forceinline__ u32 differ(u32 a, u32 b) {
  const u32 x = a ^ b;
  return (x & 0xffffu ? 1u : 0u) | (x >> 16 ? 2u : 0u);
}

// Each lane compares 8 elements of its warp's block.
extern "C" __global__ void __launch_bounds__(256) mark(
    const u8* data, const u8* base, long long num_bytes, u8* masks, u16* counts) {
  const int lane = threadIdx.x % 32;
  const long long num_blocks = (num_bytes + 511) / 512;
  const long long step = (long long)gridDim.x * 8;
  for (long long b = (long long)blockIdx.x * 8 + threadIdx.x / 32; b < num_blocks; b += step) {
    const long long at = b * 512 + lane * 16;
    u32 mask = 0;
    if (at + 16 <= num_bytes) {
      const uint4 x = *(const uint4*)(data + at), y = *(const uint4*)(base + at);
      mask = differ(x.x, y.x) | differ(x.y, y.y) << 2 | differ(x.z, y.z) << 4
           | differ(x.w, y.w) << 6;
    } else {
      for (int i = 0; i < 8; ++i)
        if (at + 2 * i + 2 <= num_bytes
            && ((const u16*)(data + at))[i] != ((const u16*)(base + at))[i]) mask |= 1u << i;
    }
    masks[b * 32 + lane] = (u8)mask;
    int found = __popc(mask);
    for (int distance = 16; distance > 0; distance /= 2)
      found += __shfl_down_sync(0xffffffffu, found, distance);
    if (lane == 0) counts[b] = (u16)found;
  }
}

// `ends`: for each block, the number of changed elements in it and before it.
extern "C" __global__ void __launch_bounds__(256) write(
    const u16* data, const u8* masks, const int* ends, long long num_blocks, u16* values,
    u8* places) {
  const int lane = threadIdx.x % 32;
  const long long step = (long long)gridDim.x * 8;
  for (long long b = (long long)blockIdx.x * 8 + threadIdx.x / 32; b < num_blocks; b += step) {
    u32 mask = masks[b * 32 + lane];
    const int own = __popc(mask);
    int before = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, before, distance);
      if (lane >= distance) before += left;
    }
    long long at = (b ? ends[b - 1] : 0) + before - own;
    while (mask) {
      const int place = lane * 8 + __ffs(mask) - 1;
      values[at] = data[b * 256 + place];
      places[at++] = (u8)place;
      mask &= mask - 1;
    }
  }
}

// A place outside of all spans is not written, whatever the payload holds.
extern "C" __global__ void __launch_bounds__(256) put(
    const int* ends, const u16* values, const u8* places, long long changed, long long num_blocks,
    const long long* offsets, const long long* sizes, const long long* addresses, int num_spans) {
  const long long step = (long long)gridDim.x * 256;
  for (long long b = (long long)blockIdx.x * 256 + threadIdx.x; b < num_blocks; b += step) {
    const long long begin = b ? ends[b - 1] : 0;
    const long long end = ends[b] < changed ? ends[b] : changed;
    if (begin < 0 || begin >= end) continue;
    int first = 0, beyond = num_spans;
    while (beyond - first > 1) {
      const int middle = (first + beyond) / 2;
      if (offsets[middle] <= b * 512) first = middle; else beyond = middle;
    }
    for (long long j = begin; j < end; ++j) {
      const long long byte = b * 512 + 2ll * places[j];
      int span = first;
      while (span + 1 < num_spans && offsets[span + 1] <= byte) ++span;
      const long long within = byte - offsets[span];
      if (within >= 0 && within + 2 <= sizes[span]) *(u16*)(addresses[span] + within) = values[j];
    }
  }
}
"""


class Targets:
    """The device memory that holds a bucket's elements: ranges of the bucket's bytes, in order."""

    def __init__(
        self, offsets: Sequence[int], sizes: Sequence[int], addresses: Sequence[int]
    ) -> None:
        """Places bytes `offsets[i]` to `offsets[i] + sizes[i]` at device address `addresses[i]`."""
        import cupy

        columns = (np.array(column, dtype=np.int64) for column in (offsets, sizes, addresses))
        self.table = tuple(cupy.asarray(column) for column in columns)
        self.num_spans = len(offsets)
        # The copies above run on the current stream, for which the caller's streams do not wait.
        cupy.cuda.get_current_stream().synchronize()


class CudaChanges:
    """Launches the kernels on the CUDA device that is current when it is constructed.

    Pointers and streams are CUDA's handles, as integers; buckets must begin at a multiple of 16
    bytes.
    """

    def __init__(self) -> None:
        import cupy

        device = cupy.cuda.runtime.getDevice()
        self._kernels = _load_kernels(device)
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self._most_grids = _GRIDS_PER_PROCESSOR * int(properties["multiProcessorCount"])

    def mark(
        self, data: int, base: int, *, num_bytes: int, masks: int, counts: int, stream: int
    ) -> None:
        """Enqueues the comparison of the buckets at the addresses `data` and `base`.

        `masks` gets a bit for each element, set if it differs; `counts` gets the number of changed
        elements of each block.
        """
        num_blocks = -(-num_bytes // (BLOCK_ELEMENTS * ELEMENT_BYTES))
        arguments = (*_pointers(data, base), np.int64(num_bytes), *_pointers(masks, counts))
        self._launch("mark", num_blocks * _WARP, arguments, stream)

    def write(
        self,
        data: int,
        masks: int,
        *,
        ends: int,
        num_blocks: int,
        payload: tuple[int, int],
        stream: int,
    ) -> None:
        """Enqueues the copy of marked elements, and of their places, into a payload.

        `payload` has the addresses for the elements and for their places. `ends` points to an int32
        for each block: the number of changed elements up to the end of the block.
        """
        arguments = (*_pointers(data, masks, ends), np.int64(num_blocks), *_pointers(*payload))
        self._launch("write", num_blocks * _WARP, arguments, stream)

    def put(
        self,
        payload: tuple[int, int],
        *,
        ends: int,
        changed: int,
        num_blocks: int,
        targets: Targets,
        stream: int,
    ) -> None:
        """Enqueues the copy of a payload's elements to their places in `targets`.

        `payload` has the addresses of the elements and of their places, `ends` is as in `write`.
        """
        numbers = (np.int64(changed), np.int64(num_blocks))
        table = (*targets.table, np.int32(targets.num_spans))
        self._launch("put", num_blocks, (*_pointers(ends, *payload), *numbers, *table), stream)

    def _launch(self, name: str, threads: int, arguments: tuple[Any, ...], stream: int) -> None:
        import cupy

        grids = min(-(-threads // _THREADS), self._most_grids)
        with cupy.cuda.ExternalStream(stream):
            self._kernels[name]((grids,), (_THREADS,), arguments)


def _pointers(*addresses: int) -> tuple[Any, ...]:
    return tuple(np.uint64(address) for address in addresses)


@functools.cache
def _load_kernels(device: int) -> dict[str, Any]:
    """Returns the kernels by name, loaded on `device`, which must be the current device.

    The first call takes seconds and may wait for all work of the device. Call it before joining a
    communicator: afterwards the device may hold a broadcast that waits for another member.
    """
    import cupy

    kernels = {name: cupy.RawKernel(_SOURCE, name) for name in ("mark", "write", "put")}
    # cupy compiles and loads a kernel at its first launch; these have no work.
    nothing, none = np.uint64(0), np.int64(0)
    kernels["mark"]((1,), (_THREADS,), (nothing, nothing, none, nothing, nothing))
    kernels["write"]((1,), (_THREADS,), (nothing, nothing, nothing, none, nothing, nothing))
    spans = (nothing, nothing, nothing, np.int32(0))
    kernels["put"]((1,), (_THREADS,), (nothing, nothing, nothing, none, none, *spans))
    cupy.cuda.get_current_stream().synchronize()
    return kernels
