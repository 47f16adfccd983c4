"""Micro batches in which sequences share prefixes: what a token predicts, sees and is."""

import numpy as np
from slipstream.extensions.prefix_sharing.trainer import PrefixTree
from slipstream.learner.trainer.model.schedule import build_tree_micro_batch
from support.fakes.packed import sequence

PROMPT = [1, 2, 3, 4]
# The second branch of the first member goes on after its reply; the other member only shares the
# prompt.
SEQUENCES = [
    sequence([*PROMPT, 10, 11, 12, 13], range(3, 7), 1.0),
    sequence([*PROMPT, 10, 11, 20], range(5, 6), 2.0),
    sequence([*PROMPT, 30, 31], range(3, 5), 3.0),
]


def packed(multiple: int = 1):
    (bundle,) = PrefixTree(SEQUENCES, range(3), min_shared=2).bundles(100)
    return build_tree_micro_batch(SEQUENCES, [bundle], multiple=multiple)


def test_common_tokens_stand_once_with_the_positions_of_their_sequences() -> None:
    micro_batch = packed()
    assert micro_batch.token_ids.tolist() == [
        1,
        2,
        3,
        4,
        10,
        11,
        12,
        13,
        11,
        20,
        4,
        30,
        31,
    ]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 3, 4, 5]


def test_each_trained_token_is_predicted_once_as_in_its_sequence() -> None:
    micro_batch = packed()
    mask = micro_batch.loss_mask
    sequences = [
        micro_batch.indices[place] for place in micro_batch.sequence_ids[mask].tolist()
    ]
    rows = zip(
        sequences,
        micro_batch.position_ids[mask].tolist(),
        micro_batch.targets[mask].tolist(),
        micro_batch.advantages[mask].tolist(),
        micro_batch.loss_weights[mask].tolist(),
        strict=True,
    )
    expected = [
        (
            index,
            place,
            sequence.token_ids[place + 1],
            sequence.advantages[place],
            sequence.loss_weight,
        )
        for index, sequence in enumerate(SEQUENCES)
        for place in np.flatnonzero(sequence.loss_mask).tolist()
    ]
    assert sorted(rows) == sorted(expected)


def test_each_token_sees_the_tokens_before_it_in_its_sequence() -> None:
    micro_batch = packed()
    bounds = micro_batch.cu_seqlens.tolist()
    keys = micro_batch.paths.cu_seqlens.tolist()
    for number in range(len(bounds) - 1):
        places = micro_batch.paths.key_places[keys[number] : keys[number + 1]]
        own_places = list(range(bounds[number], bounds[number + 1]))
        assert places[-len(own_places) :].tolist() == own_places
        ids = micro_batch.token_ids[places].tolist()
        assert any(
            sequence.token_ids[: len(ids)].tolist() == ids for sequence in SEQUENCES
        )
        assert micro_batch.position_ids[places].tolist() == list(range(len(ids)))


def test_the_copies_of_each_token_are_known() -> None:
    paths = packed().paths
    bounds = paths.copy_bounds.tolist()
    for token in range(len(bounds) - 1):
        copies = paths.copies[bounds[token] : bounds[token + 1]]
        assert copies.tolist() == (paths.key_places == token).nonzero()[:, 0].tolist()


def test_filler_sees_itself_and_belongs_to_no_sequence() -> None:
    micro_batch = packed(multiple=16)
    assert len(micro_batch.token_ids) == 16
    assert micro_batch.sequence_ids[-3:].tolist() == [3, 3, 3]
    assert not micro_batch.loss_mask[-3:].any()
    assert micro_batch.paths.key_places[-3:].tolist() == [13, 14, 15]
