"""Which keys a query sees, in groups of short sequences and in blocks of long ones."""

import itertools

import pytest
import torch
from slipstream.learner.trainer.batches.training_sequence import zigzag
from slipstream.learner.trainer.layers import attention
from slipstream.learner.trainer.layers.attention import MOST_SCORES, length_groups

CPU = torch.device("cpu")
# Packed sequences of several lengths; the first two have a length class of their own.
BOUNDS = (0, 48, 92, 100, 104)


def seen(groups, bounds, split):
    """The places of the keys that each token of a rank sees, all in the whole micro batch."""
    own_rank, size = split
    places = zigzag(bounds, own_rank, size).tolist()
    gathered = torch.cat([zigzag(bounds, rank, size) for rank in range(size)]).tolist()
    keys_by_query: dict[int, set[int]] = {}
    for group in groups:
        mask = group.seen()
        shape = (*group.queries.shape, group.keys.shape[1])
        if mask is None:
            mask = torch.ones(shape[1:], dtype=torch.bool).tril()
        mask = mask.expand(shape[0], 1, *shape[1:])[:, 0]
        for row, column in group.is_query.nonzero().tolist():
            keys = group.keys[row][mask[row, column]].tolist()
            place = places[int(group.queries[row, column])]
            assert place not in keys_by_query
            keys_by_query[place] = {gathered[key] for key in keys}
    return keys_by_query


@pytest.mark.parametrize("window", [None, 0, 5, 30])
@pytest.mark.parametrize("size", [1, 2])
def test_each_query_sees_the_tokens_of_its_sequence_up_to_itself_within_the_window(
    size, window, monkeypatch
):
    expected = {
        place: set(
            range(max(start, place - (end if window is None else window)), place + 1)
        )
        for start, end in itertools.pairwise(BOUNDS)
        for place in range(start, end)
    }
    for max_tokens in (1 << 20, 600, 40):
        monkeypatch.setattr(attention, "MOST_SCORES", max_tokens)
        length_groups.cache_clear()
        keys_by_query: dict[int, set[int]] = {}
        for rank in range(size):
            groups, order = length_groups(BOUNDS, CPU, None, (rank, size), window)
            assert order.sort()[0].tolist() == list(range(BOUNDS[-1] // size))
            keys_by_query |= seen(groups, BOUNDS, (rank, size))
        assert keys_by_query == expected


@pytest.mark.parametrize(
    ("split", "window"), [((0, 2), None), ((1, 2), 1024), ((0, 1), 1024)]
)
def test_a_long_sequence_holds_places_and_no_masks(split, window) -> None:
    groups, order = length_groups((0, 32768), CPU, None, split, window)
    tensors = [
        order,
        *(t for g in groups for t in vars(g).values() if torch.is_tensor(t)),
    ]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors
    }
    assert sum(storages.values()) < 2 << 20
    queries = {group.queries.shape[1] * group.keys.shape[1] for group in groups}
    assert max(queries) <= MOST_SCORES
