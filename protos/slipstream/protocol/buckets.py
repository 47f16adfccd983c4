"""How a model's tensors are cut into buckets, and how a bucket is proved.

Both sides derive the same plan from the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from slipstream.protocol.errors import ConfigError
from slipstream.v1 import weights_pb2

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the Hugging Face checkpoint as it travels."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Span:
    """A whole tensor within its bucket."""

    tensor: TensorSpec
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one collective."""

    spans: tuple[Span, ...]
    num_bytes: int


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cuts `tensors`, in their order, into buckets of at most `bucket_bytes`.

    A larger tensor has a bucket of its own. Every tensor starts at a multiple of 16 bytes, so that
    a view of its element type is aligned.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[Bucket] = []
    spans: list[Span] = []
    used = 0
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"tensor {tensor.name} has element type {tensor.dtype}, "
                f"known are {', '.join(ITEM_BYTES)}"
            )
        if spans and used + tensor.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(spans), used))
            spans, used = [], 0
        spans.append(Span(tensor, used))
        used = _align(used + tensor.num_bytes)
    if spans:
        buckets.append(Bucket(tuple(spans), used))
    return buckets


def bucket_digest(data: bytes | memoryview) -> bytes:
    """BLAKE2b, 16 bytes, of a bucket's bytes, padding included (which senders fill with zeros)."""
    return hashlib.blake2b(data, digest_size=16).digest()


def weight_digest(bucket_digests: Iterable[bytes]) -> bytes:
    """Identity of a whole set of weights: BLAKE2b, 16 bytes, over its bucket digests in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in bucket_digests:
        digest.update(part)
    return digest.digest()


def layout_to_pb(tensors: Sequence[TensorSpec], bucket_bytes: int) -> weights_pb2.WeightLayout:
    """The wire form of a layout."""
    return weights_pb2.WeightLayout(
        tensors=[
            weights_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in tensors
        ],
        bucket_bytes=bucket_bytes,
    )


def layout_from_pb(message: weights_pb2.WeightLayout) -> list[Bucket]:
    """The buckets of a layout."""
    return plan_buckets(
        [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in message.tensors], message.bucket_bytes
    )


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
