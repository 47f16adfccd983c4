"""Digests on a GPU, with a cupy that is not there."""

import ctypes
import hashlib
import random
import struct
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import (
    BLOCK_WORDS,
    CudaDigests,
    HostDigests,
    bucket_digest,
    bucket_tensor_digests,
    tensor_digest,
    weight_digest,
)
from support.fakes import fake_cupy

MASK = (1 << 64) - 1


def splitmix(counter: int) -> int:
    state = (counter + 1) * 0x9E3779B97F4A7C15 & MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return (state ^ (state >> 31)) | 1


def plain_digest(data: bytes) -> bytes:
    """The definition, word by word."""
    data += bytes(-len(data) % 4)
    sums = [0, 0]
    for place in range(len(data) // 4):
        word = int.from_bytes(data[4 * place : 4 * place + 4], "little")
        block, within = divmod(place, BLOCK_WORDS)
        for k in (0, 1):
            key = splitmix(2 * within + k) * splitmix(2 * BLOCK_WORDS + 2 * block + k)
            sums[k] = (sums[k] + key * word) & MASK
    return b"".join(value.to_bytes(8, "little") for value in sums)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        3,
        4,
        7,
        4 * BLOCK_WORDS - 1,
        4 * BLOCK_WORDS,
        4 * BLOCK_WORDS + 2,
        70 * BLOCK_WORDS,
    ],
)
def test_digest_is_what_its_definition_says(size: int) -> None:
    assert tensor_digest(noise(size)) == plain_digest(noise(size))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_flipped_bit_changes_both_sums(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, 8 * len(data) - 1))
    wrong = bytearray(data)
    wrong[place // 8] ^= 1 << place % 8
    right = tensor_digest(data)
    other = tensor_digest(bytes(wrong))
    assert right[:8] != other[:8]
    assert right[8:] != other[8:]


def test_tensors_of_a_bucket_are_digested_in_place() -> None:
    tensors = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "bfloat16", (5,))]
    (bucket,) = plan_buckets(tensors, 100)
    data = noise(bucket.num_bytes)
    expected = [tensor_digest(data[:12]), tensor_digest(data[16:26])]
    assert bucket_tensor_digests(bucket, data) == expected
    memory = ctypes.create_string_buffer(data, len(data))
    digests = HostDigests([bucket])
    digests.add(0, ctypes.addressof(memory), stream=0)
    assert digests.read(stream=0) == [expected]


def test_digest_of_a_bucket_is_blake2b_over_its_tensors() -> None:
    parts = [tensor_digest(b"a"), tensor_digest(b"b")]
    assert (
        bucket_digest(parts)
        == hashlib.blake2b(b"".join(parts), digest_size=16).digest()
    )


def test_identity_of_weights_depends_on_names_but_not_on_their_order() -> None:
    a = tensor_digest(b"a")
    b = tensor_digest(b"b")
    expected = hashlib.blake2b(
        b"\1\0\0\0x" + a + b"\2\0\0\0yz" + b, digest_size=16
    ).digest()
    assert weight_digest({"x": a, "yz": b}) == expected
    assert weight_digest({"yz": b, "x": a}) == expected
    assert weight_digest({"x": b, "yz": a}) != expected
    assert weight_digest({"xy": a, "z": b}) != expected


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
