"""The plan by which a model's tensors are cut into buckets.

Sender and receivers derive the same plan from the layout.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from slipstream.core.errors import ConfigError
from slipstream.v1 import weights_pb2

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT_BYTES = 16
# Least size of a last bucket that was split off. The work on the last bucket comes after the
# transfer, so that bucket is small. But each further broadcast costs as much time as 9 MB on the
# wire, or 13 MB to three servers.
LAST_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the Hugging Face checkpoint, with the type and shape in which it is sent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    # Rank, in the communicator, of the trainer rank that sends the tensor.
    sender: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorSpan:
    """A whole tensor, and the offset of its bytes in its bucket."""

    tensor: TensorSpec
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one sender that travel in one broadcast."""

    spans: tuple[TensorSpan, ...]
    num_bytes: int

    @property
    def root(self) -> int:
        return self.spans[0].tensor.sender


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cuts `tensors`, in their order, into buckets of at most `bucket_bytes`.

    A larger tensor has a bucket of its own, each sender begins a new bucket, and the last buckets
    are smaller. Every tensor starts at a multiple of 16 bytes, so that a view of its element type
    is aligned. Raises ConfigError for a bucket size below 1 or an unknown element type.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[Bucket] = []
    spans: list[TensorSpan] = []
    used_bytes = 0
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"tensor {tensor.name} has element type {tensor.dtype}, "
                f"known are {', '.join(ITEM_BYTES)}"
            )
        is_full = used_bytes + tensor.num_bytes > bucket_bytes
        if spans and (is_full or spans[-1].tensor.sender != tensor.sender):
            buckets.append(Bucket(tuple(spans), used_bytes))
            spans = []
            used_bytes = 0
        spans.append(TensorSpan(tensor, used_bytes))
        used_bytes = -(-(used_bytes + tensor.num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if spans:
        buckets += _tapered(Bucket(tuple(spans), used_bytes))
    return buckets


def layout_to_pb(
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    *,
    adapters: Sequence[TensorSpec] = (),
    adapter_scale: float = 0.0,
    adapter_names: Sequence[str] = (),
) -> weights_pb2.WeightLayout:
    """Returns the wire form of a layout; `adapters` are the tensors of one of its adapters."""
    return weights_pb2.WeightLayout(
        tensors=map(_to_pb, tensors),
        bucket_bytes=bucket_bytes,
        adapters=map(_to_pb, adapters),
        adapter_scale=adapter_scale,
        adapter_names=adapter_names,
    )


def layout_from_pb(message: weights_pb2.WeightLayout) -> list[Bucket]:
    """Returns all buckets of a layout, in the order in which they are sent."""
    return [*weight_buckets(message), *adapter_buckets(message)]


def weight_buckets(message: weights_pb2.WeightLayout) -> list[Bucket]:
    """Returns the buckets of a layout's weights without adapters, which are sent first."""
    return plan_buckets(list(map(_from_pb, message.tensors)), message.bucket_bytes)


def adapter_buckets(message: weights_pb2.WeightLayout) -> list[Bucket]:
    """Returns the buckets of a layout's adapters, which are sent last.

    Every adapter is cut into the same buckets; the adapters are sent one after another.
    """
    buckets = plan_buckets(list(map(_from_pb, message.adapters)), message.bucket_bytes)
    return buckets * max(1, len(message.adapter_names))


def num_tensors(message: weights_pb2.WeightLayout) -> int:
    """Returns the number of a layout's tensors, adapters included; it has no more buckets."""
    return len(message.tensors) + len(message.adapters) * max(1, len(message.adapter_names))


def _to_pb(tensor: TensorSpec) -> weights_pb2.TensorSpec:
    return weights_pb2.TensorSpec(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sender=tensor.sender,
    )


def _from_pb(message: weights_pb2.TensorSpec) -> TensorSpec:
    return TensorSpec(message.name, message.dtype, tuple(message.shape), message.sender)


def _tapered(bucket: Bucket) -> Iterator[Bucket]:
    """Splits a bucket at whole tensors: three quarters, three quarters of the rest, and so on.

    A receiver's digests and copies take two thirds of the transfer time, and it has two buffers.
    After a much smaller part, the transfer would wait for the buffer of the next part.
    """
    while bucket.num_bytes > 2 * LAST_BUCKET_BYTES and len(bucket.spans) > 1:
        offsets = [span.offset_bytes for span in bucket.spans]
        max_bytes = min(bucket.num_bytes * 3 // 4, bucket.num_bytes - LAST_BUCKET_BYTES)
        count = max(1, bisect.bisect_right(offsets, max_bytes) - 1)
        cut = offsets[count]
        yield Bucket(bucket.spans[:count], cut)
        rest = (TensorSpan(span.tensor, span.offset_bytes - cut) for span in bucket.spans[count:])
        bucket = Bucket(tuple(rest), bucket.num_bytes - cut)
    yield bucket
