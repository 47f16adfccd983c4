"""Digests that prove that weights arrived intact, computed on the device that holds the bytes.

The digest of a tensor is two sums over its 32-bit words w_i, for k in (a, b). Words are little
endian, the last word is padded with zeros:

    S_k = sum over i of word_key_k(i mod 4096) * block_key_k(i div 4096) * w_i   modulo 2^64

All keys are odd and pseudo-random: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) of a
counter. Because keys are odd, one wrong word always changes the digest. Several wrong words,
exchanged words or tensors, and torn or outdated buckets go unnoticed with a chance of about 2^-64
for each sum. A digest does not protect against an attacker who chooses the bytes.

The sums are of integers, so every order of addition, and so every device, gives the same result.
`HostDigests` computes them on the CPU, `CudaDigests` on a GPU, with one
kernel per bucket, which cupy compiles at its first launch and keeps on disk.
"""

import ctypes
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from slipstream.protocol.weights.buckets import Bucket

BLOCK_WORDS = 4096
# Number of blocks whose 64-bit copies fit into a core's cache.
_CHUNK_BLOCKS = 16

Words = npt.NDArray[np.uint64]


class HostDigests:
    """Digests of buckets in main memory: `add` computes them immediately, streams are ignored."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        self._found: list[list[bytes]] = [[] for _ in self._buckets]

    def add(self, place: int, pointer: int, stream: int = 0) -> None:
        """Computes the digests of bucket number `place`, whose bytes begin at `pointer`."""
        bucket = self._buckets[place]
        data = (ctypes.c_uint8 * bucket.num_bytes).from_address(pointer)
        self._found[place] = bucket_tensor_digests(bucket, memoryview(data).cast("B"))

    def read(self, stream: int = 0) -> list[list[bytes]]:
        """Returns each bucket's tensor digests."""
        return self._found


def tensor_digest(data: bytes | memoryview) -> bytes:
    """Returns the digest of a tensor's contiguous bytes: both sums, little endian, 16 bytes."""
    raw = np.frombuffer(data, dtype=np.uint8)
    rest = raw.size % 4
    words = raw[: raw.size - rest].view("<u4")
    keys = block_keys(-(-raw.size // (4 * BLOCK_WORDS)))
    num_blocks = words.size // BLOCK_WORDS
    total = _sums(
        words[: num_blocks * BLOCK_WORDS].reshape(num_blocks, BLOCK_WORDS), keys[:, :num_blocks]
    )
    tail = words[num_blocks * BLOCK_WORDS :].astype(np.uint64)
    if rest:
        last = int.from_bytes(raw[-rest:].tobytes(), "little")
        tail = np.append(tail, np.uint64(last))
    if tail.size:
        total += (word_keys()[:, : tail.size] @ tail) * keys[:, num_blocks]
    return total.astype("<u8").tobytes()


def bucket_tensor_digests(bucket: Bucket, data: bytes | memoryview) -> list[bytes]:
    """Returns the digest of each tensor of a bucket, from the bucket's bytes."""
    view = memoryview(data)
    return [
        tensor_digest(view[span.offset_bytes : span.offset_bytes + span.tensor.num_bytes])
        for span in bucket.spans
    ]


def bucket_digest(tensor_digests: Iterable[bytes]) -> bytes:
    """Returns BLAKE2b, 16 bytes, over the digests of a bucket's tensors in order."""
    return hashlib.blake2b(b"".join(tensor_digests), digest_size=16).digest()


def weight_digest(by_name: Mapping[str, bytes]) -> bytes:
    """Returns the identity of all weights: BLAKE2b, 16 bytes, over the tensors' names and digests.

    Tensors are sorted by name, so the identity depends neither on the senders nor on the bucket
    size. Each name is preceded by its length in bytes: 4 bytes, little endian.
    """
    parts: list[bytes] = []
    for name in sorted(by_name):
        encoded = name.encode()
        parts += (len(encoded).to_bytes(4, "little"), encoded, by_name[name])
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@functools.cache
def word_keys() -> Words:
    """Returns `word_key_a` and `word_key_b` [2, 4096]: a factor for each position in a block."""
    return _odd(np.arange(2 * BLOCK_WORDS, dtype=np.uint64).reshape(BLOCK_WORDS, 2).T)


def block_keys(num_blocks: int) -> Words:
    """Returns `block_key_a` and `block_key_b` [2, blocks]: a factor for each block's sum."""
    first = 2 * BLOCK_WORDS
    return _odd(np.arange(first, first + 2 * num_blocks, dtype=np.uint64).reshape(-1, 2).T)


def _odd(counters: Words) -> Words:
    """Returns splitmix64 of the counters, with the lowest bit set."""
    state = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.ascontiguousarray((state ^ (state >> np.uint64(31))) | np.uint64(1))


def _sums(blocks: npt.NDArray[np.uint32], keys: Words) -> Words:
    """Returns S_a and S_b over `blocks` [n, 4096]; `keys` are the blocks' `block_keys`."""
    first, second = word_keys()
    of_block = np.empty((2, len(blocks)), dtype=np.uint64)
    for begin in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(begin, begin + _CHUNK_BLOCKS)
        words = blocks[part].astype(np.uint64)
        # Two products by a vector: numpy's product of matrices is half as fast on integers.
        of_block[0, part] = words @ first
        of_block[1, part] = words @ second
    total: Words = np.einsum("kb,kb->k", of_block, keys)
    return total


_THREADS = 256
_GRIDS_PER_PROCESSOR = 2
_NO_BUCKET = Bucket((), 0)

# CUDA source of the kernel. Each thread keeps the keys of its 16 words of every block in registers.
# Sums of integers commute, so the result does not depend on the order of the atomics.
_SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

__device__ __forceinline__ u64 key(u64 counter) {
  u64 x = (counter + 1ull) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return (x ^ (x >> 31)) | 1ull;
}

__device__ __forceinline__ void add_to(u64* sums, u64 first, u64 second) {
  for (int distance = 16; distance > 0; distance /= 2) {
    first += __shfl_down_sync(0xffffffffu, first, distance);
    second += __shfl_down_sync(0xffffffffu, second, distance);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sums, first);
    atomicAdd(sums + 1, second);
  }
}

// A tail: its last word may be cut, bytes beyond count as 0.
__device__ __forceinline__ u32 word_at(const unsigned char* data, long long size, int place) {
  u32 word = 0;
  for (int i = 0; i < 4; ++i)
    if (4ll * place + i < size) word |= (u32)data[4ll * place + i] << (8 * i);
  return word;
}

extern "C" __global__ void __launch_bounds__(256, 2) digests(
    const unsigned char* data, const long long* offsets, const long long* sizes,
    const long long* first_blocks, int num_spans, u64* sums) {
  const long long num_blocks = first_blocks[num_spans];
  const long long share = (num_blocks + gridDim.x - 1) / gridDim.x;
  const long long begin = blockIdx.x * share;
  const long long end = begin + share < num_blocks ? begin + share : num_blocks;
  if (begin >= end) return;
  u64 first_keys[16], second_keys[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int place = 4 * (threadIdx.x + 256 * (i / 4)) + i % 4;
    first_keys[i] = key(2ull * place);
    second_keys[i] = key(2ull * place + 1);
  }
  int span = 0, beyond = num_spans;
  while (beyond - span > 1) {
    const int middle = (span + beyond) / 2;
    if (first_blocks[middle] <= begin) span = middle; else beyond = middle;
  }
  u64 first = 0, second = 0;
  for (long long g = begin; g < end; ++g) {
    if (g >= first_blocks[span + 1]) {
      add_to(sums + 2 * span, first, second);
      first = second = 0;
      do ++span; while (g >= first_blocks[span + 1]);
    }
    const long long block = g - first_blocks[span];
    const unsigned char* bytes = data + offsets[span] + block * 16384;
    const long long left = sizes[span] - block * 16384;
    u64 of_first = 0, of_second = 0;
    if (left >= 16384) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint4 words = ((const uint4*)bytes)[threadIdx.x + 256 * r];
        of_first += first_keys[4 * r] * words.x + first_keys[4 * r + 1] * words.y
                  + first_keys[4 * r + 2] * words.z + first_keys[4 * r + 3] * words.w;
        of_second += second_keys[4 * r] * words.x + second_keys[4 * r + 1] * words.y
                   + second_keys[4 * r + 2] * words.z + second_keys[4 * r + 3] * words.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int place = 4 * (threadIdx.x + 256 * (i / 4)) + i % 4;
        const u64 word = word_at(bytes, left, place);
        of_first += first_keys[i] * word;
        of_second += second_keys[i] * word;
      }
    }
    first += of_first * key(8192ull + 2 * block);
    second += of_second * key(8193ull + 2 * block);
  }
  add_to(sums + 2 * span, first, second);
}
"""


class CudaDigests:
    """Computes digests of buckets on the CUDA device that is current when it is constructed.

    Each bucket must be on this device and begin at a multiple of 16 bytes. Pointers and streams are
    CUDA's handles, as integers.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        import cupy
        import cupyx

        device = cupy.cuda.runtime.getDevice()
        self._kernel = load_kernel(device)
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self._most_grids = _GRIDS_PER_PROCESSOR * int(properties["multiProcessorCount"])
        self._ends = np.cumsum([0, *(len(bucket.spans) for bucket in buckets)])
        self._tables = [_table(bucket) for bucket in buckets]
        self._sums = cupy.zeros((int(self._ends[-1]), 2), dtype=np.uint64)
        # Pinned memory lets the copy to the host be enqueued after the kernels.
        self._found = cupyx.empty_pinned(self._sums.shape, dtype=np.uint64)
        # The copies above run on the current stream, for which the caller's streams do not wait.
        cupy.cuda.get_current_stream().synchronize()

    def add(self, place: int, pointer: int, stream: int) -> None:
        """Enqueues the digests of bucket number `place`, whose bytes begin at `pointer`."""
        import cupy

        table, num_blocks = self._tables[place]
        num_spans = int(self._ends[place + 1] - self._ends[place])
        sums = self._sums[int(self._ends[place]) : int(self._ends[place + 1])]
        cupy.cuda.runtime.memsetAsync(sums.data.ptr, 0, sums.nbytes, stream)
        if not num_blocks:
            return
        arguments = (np.uint64(pointer), *table, np.int32(num_spans), sums)
        with cupy.cuda.ExternalStream(stream):
            self._kernel((min(num_blocks, self._most_grids),), (_THREADS,), arguments)

    def read(self, stream: int) -> list[list[bytes]]:
        """Waits for the work on `stream`; returns each bucket's tensor digests."""
        import cupy

        external = cupy.cuda.ExternalStream(stream)
        self._sums.get(stream=external, out=self._found, blocking=False)
        # The wait is here and not in the copy: an abort of a communicator surely releases only a
        # wait for a stream.
        external.synchronize()
        data = self._found.astype("<u8", copy=False).tobytes()
        rows = [data[place : place + 16] for place in range(0, len(data), 16)]
        ends = self._ends.tolist()
        return [rows[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _table(bucket: Bucket) -> tuple[tuple[Any, Any, Any], int]:
    """Returns three device arrays (each tensor's offset, size, first block) and the block count."""
    import cupy

    sizes = np.array([span.tensor.num_bytes for span in bucket.spans], dtype=np.int64)
    offsets = np.array([span.offset_bytes for span in bucket.spans], dtype=np.int64)
    first_blocks = np.cumsum([0, *(-(-sizes // (4 * BLOCK_WORDS)))]).astype(np.int64)
    arrays = (cupy.asarray(offsets), cupy.asarray(sizes), cupy.asarray(first_blocks))
    return arrays, int(first_blocks[-1])


@functools.cache
def load_kernel(device: int) -> Any:  # noqa: ANN401 - cupy has no types
    """Returns the kernel, loaded on `device`, which must be the current device.

    The first call takes seconds and may wait for all work of the device. Call it before joining a
    communicator: afterwards the device may hold a broadcast that waits for another member.
    """
    import cupy

    kernel = cupy.RawKernel(_SOURCE, "digests")
    # cupy compiles and loads the kernel at its first launch.
    no_sums = cupy.zeros((0, 2), dtype=np.uint64)
    kernel((1,), (_THREADS,), (np.uint64(0), *_table(_NO_BUCKET)[0], np.int32(0), no_sums))
    cupy.cuda.get_current_stream().synchronize()
    return kernel


BucketDigests: TypeAlias = HostDigests | CudaDigests


def open_digests(buckets: Sequence[Bucket], gpu: int | None) -> BucketDigests:
    """Returns an object that computes the digests of `buckets` on a CUDA device, or on the CPU."""
    if gpu is None:
        return HostDigests(buckets)
    import cupy

    with cupy.cuda.Device(gpu):
        return CudaDigests(buckets)
