"""Bundles of sequences with shared prefixes: every position once, every path complete."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.extensions.prefix_sharing.trainer import (
    PrefixTree,
    Segment,
    num_squares,
    num_tokens,
)
from support.fakes.packed import sequence
from support.rigs.fuzz_budget import times


def group(prompt, replies):
    """Makes one sequence for each reply to the same prompt, which train the replies."""
    return [
        sequence(
            [*prompt, *reply], range(len(prompt) - 1, len(prompt) + len(reply) - 1)
        )
        for reply in replies
    ]


def test_the_prompt_of_a_group_is_one_segment():
    sequences = group(range(10), [[50, 51], [60], [70, 71, 72]])
    (bundle,) = PrefixTree(sequences, [0, 1, 2], min_shared=4).bundles(100)
    # The prompt's last token predicts another token in each member, so each has it.
    assert bundle == [
        Segment(0, 0, 9),
        Segment(0, 9, 12, 0),
        Segment(1, 9, 11, 0),
        Segment(2, 9, 13, 0),
    ]
    assert num_tokens(bundle) == 9 + 3 + 2 + 4


def test_members_with_branches_share_the_prompt_and_each_its_own_turns():
    prompt = list(range(10))
    replies = ([50, 51, 52, 53, 54], [60, 61, 62, 63, 64])
    sequences = []
    for reply in replies:
        token_ids = [*prompt, *reply]
        sequences.append(sequence([*token_ids, 1, 2], range(9, 14)))
        sequences.append(sequence([*token_ids, 3, 4], [15]))
    (bundle,) = PrefixTree(sequences, range(4), min_shared=4).bundles(100)
    assert bundle[0] == Segment(0, 0, 9)
    assert bundle[1:4] == [
        Segment(0, 9, 14, 0),
        Segment(0, 14, 17, 1),
        Segment(1, 14, 17, 1),
    ]
    assert num_tokens(bundle) == 9 + 2 * (5 + 3 + 3)


def test_short_prefixes_are_not_shared():
    sequences = group(range(5), [[50, 51], [60]])
    assert PrefixTree(sequences, [0, 1], min_shared=5).bundles(100) == [
        [Segment(0, 0, 7)],
        [Segment(1, 0, 6)],
    ]


def test_a_long_group_is_cut_into_bundles_that_fit():
    sequences = group(range(10), [[50 + n] * 8 for n in range(6)])
    bundles = PrefixTree(sequences, range(6), min_shared=4).bundles(40)
    assert len(bundles) == 2 and all(num_tokens(bundle) <= 40 for bundle in bundles)


@pytest.mark.parametrize("members", [[], [2], [2, 0]])
def test_only_members_are_bundled(members):
    sequences = group(range(10), [[50], [60], [70]])
    bundles = PrefixTree(sequences, members, min_shared=4).bundles(100)
    assert {segment.index for bundle in bundles for segment in bundle} == set(members)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=times(400))
@given(
    st.lists(st.tuples(tokens, st.integers(0, 2**14)), max_size=7),
    st.integers(1, 4),
    st.integers(4, 60),
)
def test_each_path_has_the_tokens_of_its_sequence_and_trains_them_once(
    drawn, min_shared, limit
):
    sequences = [
        sequence(ids, [place for place in range(len(ids) - 1) if bits >> place & 1])
        for ids, bits in drawn
    ]
    bundles = PrefixTree(
        sequences, range(len(sequences)), min_shared=min_shared
    ).bundles(limit)
    trained = []
    for bundle in bundles:
        leaves = set()
        for place, segment in enumerate(bundle):
            path = []
            at = place
            while at is not None:
                assert bundle[at].parent is None or bundle[at].parent < at
                path.insert(0, bundle[at])
                at = bundle[at].parent
            assert [segment.end for segment in path[:-1]] == [
                segment.start for segment in path[1:]
            ]
            assert path[0].start == 0
            ids = [
                t
                for segment in path
                for t in sequences[segment.index].token_ids[segment.start : segment.end]
            ]
            owner = sequences[segment.index]
            assert ids == owner.token_ids[: segment.end].tolist()
            trained += [
                (segment.index, n)
                for n in range(segment.start, segment.end)
                if owner.loss_mask[n]
            ]
            if segment.end == len(owner):
                leaves.add(segment.index)
        indices = {segment.index for segment in bundle}
        assert leaves == indices
        assert num_tokens(bundle) <= limit or len(indices) == 1
        assert num_squares(bundle) <= sum(
            len(sequences[index]) ** 2 for index in indices
        )
    expected = [
        (i, n)
        for i, sequence in enumerate(sequences)
        for n in np.flatnonzero(sequence.loss_mask)
    ]
    assert sorted(trained) == expected
    assert sorted(i for b in bundles for i in {s.index for s in b}) == list(
        range(len(sequences))
    )
