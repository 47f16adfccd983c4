"""Digests that prove that weights arrived intact, computed on the device that holds the bytes.

The digest of a tensor is two sums over its 32-bit words w_i, for k in (a, b). Words are little
endian, the last word is padded with zeros:

    S_k = sum over i of word_key_k(i mod 4096) * block_key_k(i div 4096) * w_i   modulo 2^64

All keys are odd and pseudo-random: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) of a
counter. Because keys are odd, one wrong word always changes the digest. Several wrong words,
exchanged words or tensors, and torn or outdated buckets go unnoticed with a chance of about 2^-64
for each sum. A digest does not protect against an attacker who chooses the bytes.

The sums are of integers, so every order of addition, and so every device, gives the same result.
`HostDigests` computes them on the CPU, `cuda_digests.CudaDigests` on a GPU.
"""

import ctypes
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from slipstream.protocol.weights.buckets import Bucket

BLOCK_WORDS = 4096
# Number of blocks whose 64-bit copies fit into a core's cache.
_CHUNK_BLOCKS = 16

Words = npt.NDArray[np.uint64]


class BucketDigests(Protocol):
    """Computes the digests of all tensors in a pass over some buckets.

    Pointers and streams are CUDA's handles, as integers.
    """

    def add(self, place: int, pointer: int, stream: int) -> None:
        """Enqueues the digests of bucket number `place`, whose bytes begin at `pointer`."""

    def read(self, stream: int) -> list[list[bytes]]:
        """Waits for the work on `stream`; returns each bucket's tensor digests."""


class HostDigests:
    """Digests of buckets in main memory: `add` computes them immediately, streams are ignored."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        self._found: list[list[bytes]] = [[] for _ in self._buckets]

    def add(self, place: int, pointer: int, stream: int = 0) -> None:
        bucket = self._buckets[place]
        data = (ctypes.c_uint8 * bucket.num_bytes).from_address(pointer)
        self._found[place] = bucket_tensor_digests(bucket, memoryview(data).cast("B"))

    def read(self, stream: int = 0) -> list[list[bytes]]:
        return self._found


def tensor_digest(data: bytes | memoryview) -> bytes:
    """Returns the digest of a tensor's contiguous bytes: both sums, little endian, 16 bytes."""
    raw = np.frombuffer(data, dtype=np.uint8)
    rest = raw.size % 4
    words = raw[: raw.size - rest].view("<u4")
    keys = block_keys(-(-raw.size // (4 * BLOCK_WORDS)))
    whole = words.size // BLOCK_WORDS
    total = _sums(words[: whole * BLOCK_WORDS].reshape(whole, BLOCK_WORDS), keys[:, :whole])
    tail = words[whole * BLOCK_WORDS :].astype(np.uint64)
    if rest:
        last = int.from_bytes(raw[-rest:].tobytes(), "little")
        tail = np.append(tail, np.uint64(last))
    if tail.size:
        total += (word_keys()[:, : tail.size] @ tail) * keys[:, whole]
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
        of_block[0, part], of_block[1, part] = words @ first, words @ second
    total: Words = np.einsum("kb,kb->k", of_block, keys)
    return total
