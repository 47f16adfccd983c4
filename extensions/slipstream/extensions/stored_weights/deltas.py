"""The wire form of a bucket when only its changed elements are sent.

An element is a 16-bit unit of the bucket's bytes, whatever the tensors' types: bits are compared,
so -0.0 differs from 0.0 and a NaN's payload counts. Elements are numbered in blocks of 256. A
payload of c changed elements holds, one after the other and little endian:

    for each block, the number of its changed elements    uint16
    the new elements, in order                            uint16 [c]
    their places in their blocks                          uint8 [c]
    zeros up to a multiple of 16 bytes

That is 3 bytes for each changed element and 1/256 of the whole. A bucket whose payload is more than
half of the bucket travels whole. Sender and receivers derive this from the number of changed
elements, which travels with the order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ProtocolError
from slipstream.protocol.weights.buckets import ALIGNMENT_BYTES, Bucket
from slipstream.protocol.weights.digests import bucket_digest

ELEMENT_BYTES = 2
BLOCK_ELEMENTS = 256
_COUNT_BYTES = 2

Elements = npt.NDArray[np.uint16]
# Indices in a bucket, of elements or of bytes.
Places = npt.NDArray[np.int64]


def num_blocks(bucket: Bucket) -> int:
    """Returns the number of a bucket's blocks; the last one may be shorter."""
    return -(-bucket.num_bytes // (ELEMENT_BYTES * BLOCK_ELEMENTS))


def payload_parts(bucket: Bucket, changed: int) -> tuple[int, int, int]:
    """Returns the byte offsets of a payload's elements, of their places, and of the end."""
    elements = _COUNT_BYTES * num_blocks(bucket)
    places = elements + ELEMENT_BYTES * changed
    return elements, places, -(-(places + changed) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def travels_whole(bucket: Bucket, changed: int) -> bool:
    """Whether a bucket with `changed` changed elements is sent whole, not as a payload."""
    return 2 * payload_parts(bucket, changed)[2] > bucket.num_bytes


def on_the_wire(buckets: Sequence[Bucket], changed: Sequence[int]) -> tuple[Bucket, ...]:
    """Returns the buckets with the numbers of bytes in which they are sent, as payload or whole.

    `changed` has the number of changed elements of each bucket.
    """
    return tuple(
        bucket
        if travels_whole(bucket, count)
        else replace(bucket, num_bytes=payload_parts(bucket, count)[2])
        for bucket, count in zip(buckets, changed, strict=True)
    )


def put_payload(
    elements: Elements, payload: bytes | memoryview, bucket: Bucket, changed: int
) -> None:
    """Writes the changed elements of a payload to their places in `elements`, in main memory.

    Raises ProtocolError, and writes nothing, if the payload does not match this bucket and
    `changed`.
    """
    first, second, end = payload_parts(bucket, changed)
    if len(payload) != end:
        raise ProtocolError(f"a payload of {changed} changes has {end} bytes, got {len(payload)}")
    raw = np.frombuffer(payload, dtype=np.uint8)
    per_block = raw[:first].view("<u2")
    if int(per_block.sum(dtype=np.int64)) != changed:
        raise ProtocolError(f"a payload should have {changed} changes, got {per_block.sum()}")
    blocks = np.repeat(np.arange(len(per_block), dtype=np.int64), per_block)
    places = blocks * BLOCK_ELEMENTS + raw[second : second + changed]
    if changed and int(places.max()) >= len(elements):
        raise ProtocolError(f"a payload names element {places.max()} of {len(elements)}")
    elements[places] = raw[first:second].view("<u2")


def payload_of(elements: Elements, places: Places, bucket: Bucket) -> bytes:
    """Returns the payload of the elements at the ascending indices `places`."""
    per_block = np.bincount(places // BLOCK_ELEMENTS, minlength=num_blocks(bucket))
    within = (places % BLOCK_ELEMENTS).astype(np.uint8)
    parts = per_block.astype("<u2").tobytes(), elements[places].tobytes(), within.tobytes()
    return b"".join(parts).ljust(payload_parts(bucket, len(places))[2], b"\0")


def gap_bytes(bucket: Bucket) -> Places:
    """Returns the indices of a bucket's bytes that belong to no tensor.

    These bytes keep earlier contents of the memory, which would count as changes.
    """
    ends = [span.offset_bytes + span.tensor.num_bytes for span in bucket.spans]
    begins = [*(span.offset_bytes for span in bucket.spans[1:]), bucket.num_bytes]
    found = [np.arange(*gap, dtype=np.int64) for gap in zip(ends, begins, strict=True)]
    return np.concatenate(found)


def content_name(bucket_digests: Iterable[bytes]) -> bytes:
    """Returns the name of all buckets' content, a digest of their digests; b"" without buckets."""
    digests = list(bucket_digests)
    return bucket_digest(digests) if digests else b""
