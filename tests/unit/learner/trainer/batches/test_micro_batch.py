import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.learner.trainer.batches.micro_batch import (
    build_micro_batch,
    gathered_places,
    share_of_rank,
    zigzag,
)
from slipstream.learner.trainer.batches.training_sequence import TokenEstimates, TrainingSequence
from support.fakes.fake_controller import make_batch
from torch import Tensor

PARTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def bounds_of(parts: list[int], size: int) -> list[int]:
    return list(itertools.accumulate((2 * size * part for part in parts), initial=0))


def test_each_rank_holds_a_chunk_from_the_front_and_its_mirror_image_of_every_sequence() -> None:
    assert zigzag([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_one_rank_holds_everything_in_order_whatever_the_lengths() -> None:
    assert zigzag([0, 3, 4], 0, 1).tolist() == [0, 1, 2, 3]


def test_sequence_that_cannot_be_cut_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="a sequence of 6 tokens cannot be cut for cp 2"):
        zigzag([0, 6], 0, 2)


@settings(deadline=None)
@given(parts=PARTS, size=st.integers(2, 4))
def test_every_token_is_held_once_and_every_rank_holds_as_many(parts: list[int], size: int) -> None:
    bounds = bounds_of(parts, size)
    held = [zigzag(bounds, rank, size) for rank in range(size)]
    assert len({len(places) for places in held}) == 1
    assert sorted(torch.cat(held).tolist()) == list(range(bounds[-1]))
    places = gathered_places(tuple(bounds), size)
    assert torch.cat(held)[places].tolist() == list(range(bounds[-1]))


@settings(deadline=None)
@given(parts=PARTS, size=st.integers(2, 4))
def test_ranks_have_equal_work_under_a_causal_mask(parts: list[int], size: int) -> None:
    bounds = bounds_of(parts, size)
    starts = torch.tensor(bounds[:-1]).repeat_interleave(torch.tensor(bounds).diff())
    keys = torch.arange(bounds[-1]) - starts + 1
    work = [int(keys[zigzag(bounds, rank, size)].sum()) for rank in range(size)]
    assert len(set(work)) == 1


def test_shares_are_those_of_every_tensor_of_tokens() -> None:
    batch = make_batch(3, num_groups=2, group_size=3, vocab_size=99, max_tokens=20)
    numbers = [
        torch.arange(t.num_sampled_tokens, dtype=torch.float32).numpy() for t in batch.trajectories
    ]
    estimates = [TokenEstimates(e, e + 1, e + 2, e + 3) for e in numbers]
    sequences = TrainingSequence.of_trajectories(batch.trajectories, estimates, step=batch.step)
    whole = build_micro_batch(sequences, range(6), multiple=8, sequence_multiple=4)
    shares = [share_of_rank(whole, rank, 2) for rank in range(2)]
    bounds = whole.cu_seqlens.tolist()
    tensors = {name: value for name, value in vars(whole).items() if isinstance(value, Tensor)}
    assert len(tensors) > 10
    for name, tensor in tensors.items():
        for rank, share in enumerate(shares):
            kept = tensor if name == "cu_seqlens" else tensor[zigzag(bounds, rank, 2)]
            assert torch.equal(getattr(share, name), kept), name
    assert [share.max_seqlen for share in shares] == [whole.max_seqlen] * 2
    assert [share.indices for share in shares] == [whole.indices] * 2
    assert sum(int(share.loss_mask.sum()) for share in shares) == int(whole.loss_mask.sum())


def test_the_only_rank_trains_the_whole() -> None:
    whole = build_micro_batch([], [])
    assert share_of_rank(whole, 0, 1) is whole
