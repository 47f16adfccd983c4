"""How a bucket travels of which some elements changed."""

import random

import numpy as np
import pytest
from slipstream.extensions.stored_weights.storage import (
    content_name,
    num_blocks,
    payload_of,
    payload_parts,
    put_payload,
    travels_whole,
    wire_bytes,
)
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from support.references import plain_deltas

(BUCKET,) = plan_buckets([TensorSpec("a", "bfloat16", (1000,))], 4000)


@pytest.mark.parametrize("changed", [0, 1, 7, 300])
def test_the_size_of_a_payload_follows_from_the_number_of_changes(changed: int) -> None:
    rng = random.Random(changed)
    old = rng.randbytes(BUCKET.num_bytes)
    new = bytearray(old)
    for place in rng.sample(range(1000), changed):
        new[2 * place] ^= 1
    payload = plain_deltas.encode(old, bytes(new))
    assert payload_parts(BUCKET, changed)[2] == len(payload)
    assert plain_deltas.decode(old, payload) == new
    # Ours write and read the same.
    before = np.frombuffer(bytearray(old), np.uint16)
    after = np.frombuffer(new, np.uint16)
    places = np.flatnonzero(before != after)
    assert payload_of(after, places, BUCKET) == payload
    put_payload(before, payload, BUCKET, changed)
    assert before.tobytes() == new


def test_elements_lie_in_blocks_of_256() -> None:
    assert num_blocks(BUCKET) == 4
    # Four counts of 2 bytes, 5 elements, 5 places.
    assert payload_parts(BUCKET, 5) == (8, 18, 32)


def test_a_bucket_travels_whole_when_its_payload_is_longer_than_half_of_it() -> None:
    max_changed = max(
        c for c in range(1000) if payload_parts(BUCKET, c)[2] <= BUCKET.num_bytes / 2
    )
    assert 320 < max_changed < 333
    assert not travels_whole(BUCKET, max_changed)
    assert travels_whole(BUCKET, max_changed + 16)
    assert wire_bytes(BUCKET, 1000) == BUCKET.num_bytes
    assert wire_bytes(BUCKET, 2) == 16


def test_a_tiny_bucket_travels_whole() -> None:
    (tiny,) = plan_buckets([TensorSpec("a", "bfloat16", (8,))], 4000)
    assert travels_whole(tiny, 0)


def test_the_name_of_a_content_depends_on_every_bucket_and_their_order() -> None:
    names = {content_name(digests) for digests in ([b"a"], [b"a", b"b"], [b"b", b"a"])}
    assert len(names) == 3
    assert content_name([]) == b""
