"""Sets of tokens that sampled tokens were drawn from, and their packed form."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.errors import ProtocolError
from slipstream.core.kept_tokens import (
    BYTES_PER_COUNT,
    BYTES_PER_ID,
    MAX_KEPT_TOKENS,
    KeptTokens,
)
from slipstream.protocol.codec import decode_trajectory, encode_trajectory
from support.fakes.plain_trajectory import plain_trajectory

token_ids = st.integers(0, 2**32 - 1)
token_sets = st.sets(token_ids, max_size=5)
sets_of_ids = st.lists(
    token_sets.map(sorted),
    max_size=8,
)


@given(sets_of_ids)
def test_packed_sets_are_read_as_they_were(sets: list[list[int]]) -> None:
    data = KeptTokens.of_sets(sets).packed()
    unpacked = KeptTokens.unpacked(data, len(sets))
    sizes = list(map(len, sets))
    assert unpacked.counts.tolist() == sizes
    assert unpacked.ids.tolist() == sum(sets, [])
    assert unpacked.width == max(sizes, default=0)


def test_the_first_id_and_the_distances_are_packed_behind_the_numbers() -> None:
    data = KeptTokens.of_sets([[7, 3], [], [300]]).packed()
    # 2, 0 and 1 tokens; 3 and 4 more; 300 is 2 * 128 + 44.
    numbers = [2, 0, 1, 3, 4, 128 + 44, 2]
    assert list(data) == numbers


def test_sets_of_no_token_take_no_bytes() -> None:
    data = KeptTokens.of_sets([[], []]).packed()
    assert data == b""
    unpacked = KeptTokens.unpacked(data, 2)
    assert unpacked.counts.tolist() == [0, 0]


def test_a_table_has_ids_plus_1_and_zeros_behind() -> None:
    rows = KeptTokens.of_sets([[7, 3], [], [0]]).table(2)
    assert rows.tolist() == [
        [4, 8],
        [0, 0],
        [1, 0],
    ]


def test_joined_sets_are_those_of_consecutive_tokens() -> None:
    parts = [
        KeptTokens.of_sets([[1, 2]]),
        KeptTokens.of_all(1),
        KeptTokens.of_sets([[5]]),
    ]
    joined = KeptTokens.joined(parts)
    assert joined.counts.tolist() == [2, 0, 1]
    assert joined.ids.tolist() == [1, 2, 5]
    nothing = KeptTokens.joined([])
    assert nothing.packed() == b""


def test_no_set_takes_more_bytes_than_a_lease_reserves() -> None:
    ids = np.linspace(0, 2**21 - 1, MAX_KEPT_TOKENS)
    data = KeptTokens.of_sets([ids.astype(int).tolist()]).packed()
    assert len(data) <= BYTES_PER_COUNT + BYTES_PER_ID * MAX_KEPT_TOKENS


LARGEST_AND_ONE = b"\x81\x08\x00" + b"\x01" * 1025


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80", "end within a number"),
        (b"\x80\x80\x80\x80\x80\x01", "more than 5 bytes"),
        (b"\x01", "of 2 sampled tokens have 1 numbers"),
        (b"\x01\x01\x05", "of which 2 should be ids"),
        (b"\x02\x00\x05\x00", "name a token twice"),
        (LARGEST_AND_ONE, "1025 kept tokens, more than 1024"),
    ],
)
def test_bytes_that_are_no_sets_are_refused(
    data: bytes,
    words: str,
) -> None:
    with pytest.raises(ProtocolError, match=words):
        KeptTokens.unpacked(data, 2)


def test_a_trajectory_whose_token_is_not_in_its_set_is_refused() -> None:
    data = KeptTokens.of_sets([[4, 9], []]).packed()
    trajectory = plain_trajectory(
        [1, 4, 5],
        (1, 2),
        kept_tokens=data,
    )
    decoded = decode_trajectory(encode_trajectory(trajectory))
    assert decoded.kept_tokens == data
    other_tokens = dataclasses.replace(
        trajectory,
        token_ids=np.array([1, 5, 5], np.uint32),
    )
    with pytest.raises(ProtocolError, match="its kept tokens lack sampled token 0"):
        decode_trajectory(encode_trajectory(other_tokens))


@given(st.lists(st.sets(st.integers(0, 200_000), min_size=1, max_size=200), max_size=8))
def test_numbers_of_tokens_are_read_without_their_ids(sets: list[set[int]]) -> None:
    kept_tokens = KeptTokens.of_sets([[*ids] for ids in sets])
    counts = KeptTokens.packed_counts(kept_tokens.packed(), len(sets))
    assert counts.tolist() == [len(ids) for ids in sets]


def test_bytes_without_all_numbers_of_tokens_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 numbers for 2 sampled"):
        KeptTokens.packed_counts(b"\x01", 2)
