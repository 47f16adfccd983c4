"""How a model's tensors are cut into buckets.

Both sides derive the same plan from the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # Rank in the communicator of the trainer rank that sends it.
    sender: int = 0

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
    """Tensors of one sender that travel in one broadcast."""

    spans: tuple[Span, ...]
    num_bytes: int

    @property
    def root(self) -> int:
        """Rank in the communicator of the sender."""
        return self.spans[0].tensor.sender


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cuts `tensors`, in their order, into buckets of at most `bucket_bytes`.

    A larger tensor has a bucket of its own; another sender begins another bucket. Every tensor
    starts at a multiple of 16 bytes, so that a view of its element type is aligned.
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
        is_full = used + tensor.num_bytes > bucket_bytes
        if spans and (is_full or spans[-1].tensor.sender != tensor.sender):
            buckets.append(Bucket(tuple(spans), used))
            spans, used = [], 0
        spans.append(Span(tensor, used))
        used = _align(used + tensor.num_bytes)
    if spans:
        buckets.append(Bucket(tuple(spans), used))
    return buckets


def layout_to_pb(tensors: Sequence[TensorSpec], bucket_bytes: int) -> weights_pb2.WeightLayout:
    """The wire form of a layout."""
    return weights_pb2.WeightLayout(
        tensors=[
            weights_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, sender=t.sender)
            for t in tensors
        ],
        bucket_bytes=bucket_bytes,
    )


def tensors_from_pb(message: weights_pb2.WeightLayout) -> list[TensorSpec]:
    """The tensors of a layout, in order."""
    return [TensorSpec(t.name, t.dtype, tuple(t.shape), t.sender) for t in message.tensors]


def layout_from_pb(message: weights_pb2.WeightLayout) -> list[Bucket]:
    """The buckets of a layout."""
    return plan_buckets(tensors_from_pb(message), message.bucket_bytes)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
