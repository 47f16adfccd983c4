"""Packing of sequences into micro batches, and their split over context parallel ranks."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.types import Branch
from slipstream.learner.trainer.batches.training_sequence import (
    TokenEstimates,
    TrainingSequence,
    gathered_places,
    share_of_rank,
    token_lags,
    zigzag,
)
from support.fakes.fake_controller import make_batch, with_branches
from support.fakes.packed import packed
from torch import Tensor

PARTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def bounds_of(parts: list[int], size: int) -> list[int]:
    return list(itertools.accumulate((2 * size * part for part in parts), initial=0))


def test_each_rank_holds_a_chunk_from_the_front_and_its_mirror_image_of_every_sequence() -> (
    None
):
    assert zigzag([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_sequence_that_cannot_be_cut_is_a_mistake() -> None:
    with pytest.raises(
        AssertionError, match="a sequence of 6 tokens cannot be cut for cp 2"
    ):
        zigzag([0, 6], 0, 2)


@given(parts=PARTS, size=st.integers(2, 4))
def test_every_token_is_held_once_and_every_rank_holds_as_many(
    parts: list[int], size: int
) -> None:
    bounds = bounds_of(parts, size)
    zigzags = [zigzag(bounds, rank, size) for rank in range(size)]
    assert len({len(places) for places in zigzags}) == 1
    assert sorted(torch.cat(zigzags).tolist()) == list(range(bounds[-1]))
    places = gathered_places(tuple(bounds), size)
    assert torch.cat(zigzags)[places].tolist() == list(range(bounds[-1]))


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
        torch.arange(t.num_sampled_tokens, dtype=torch.float32).numpy()
        for t in batch.trajectories
    ]
    estimates = [TokenEstimates(e, e + 1, e + 2, e + 3) for e in numbers]
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories, estimates, step=batch.step
    )
    micro_batch = packed(sequences, range(6), multiple=8, sequence_multiple=4)
    shares = [share_of_rank(micro_batch, rank, 2) for rank in range(2)]
    bounds = micro_batch.cu_seqlens.tolist()
    tensors = {
        name: value
        for name, value in vars(micro_batch).items()
        if isinstance(value, Tensor)
    }
    assert len(tensors) > 10
    for name, tensor in tensors.items():
        for rank, share in enumerate(shares):
            expected = (
                tensor if name == "cu_seqlens" else tensor[zigzag(bounds, rank, 2)]
            )
            assert torch.equal(getattr(share, name), expected), name
    assert [share.max_seqlen for share in shares] == [micro_batch.max_seqlen] * 2
    assert [share.indices for share in shares] == [micro_batch.indices] * 2
    assert sum(int(share.loss_mask.sum()) for share in shares) == int(
        micro_batch.loss_mask.sum()
    )


def test_the_only_rank_trains_the_whole() -> None:
    micro_batch = packed([], [])
    assert share_of_rank(micro_batch, 0, 1) is micro_batch


def sequence(
    token_ids: list[int], trained: list[bool], advantage: float
) -> TrainingSequence:
    """`trained[i]`: the prediction of token i is trained."""
    mask = np.array([*trained[1:], False])
    return TrainingSequence(
        token_ids=np.array(token_ids),
        targets=np.array([*token_ids[1:], 0]),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        lags=mask.astype(np.int32),
        advantages=np.full(len(mask), advantage, dtype=np.float32),
    )


def estimates(number: int, advantage: float) -> TokenEstimates:
    return TokenEstimates(np.full(number, advantage, dtype=np.float32))


def test_micro_batch_lays_sequences_side_by_side() -> None:
    first = sequence([5, 6, 7], [False, True, True], 0.5)
    second = sequence([8, 9], [False, True], -1.0)
    micro_batch = packed([first, second], [1, 0])
    assert micro_batch.token_ids.tolist() == [8, 9, 5, 6, 7]
    assert micro_batch.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert micro_batch.targets.tolist() == [9, 0, 6, 7, 0]
    assert micro_batch.loss_mask.tolist() == [True, False, True, True, False]
    assert micro_batch.advantages.tolist() == [-1.0, -1.0, 0.5, 0.5, 0.5]
    assert micro_batch.behavior_logprobs.tolist() == [-0.5, 0, -0.5, -0.5, 0]
    assert micro_batch.lags.tolist() == [1, 0, 1, 1, 0]
    assert micro_batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert micro_batch.loss_weights.tolist() == [1.0] * 5
    assert micro_batch.reference_logprobs is None
    assert micro_batch.cu_seqlens.tolist() == [0, 2, 5]
    assert micro_batch.max_seqlen == 3
    assert micro_batch.indices == (1, 0)


def test_filler_makes_the_tokens_a_multiple_and_carries_no_loss() -> None:
    micro_batch = packed(
        [sequence([5, 6, 7], [False, True, True], 1.0)], [0], multiple=4
    )
    assert micro_batch.token_ids.tolist() == [5, 6, 7, 0]
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 4]
    assert micro_batch.loss_mask.tolist() == [True, True, False, False]
    assert micro_batch.is_padding.tolist() == [False, False, False, True]
    assert micro_batch.indices == (0,)


def test_likely_tokens_of_a_reference_stand_where_the_sampled_token_is_predicted() -> (
    None
):
    batch = with_branches(
        make_batch(0, num_groups=1, group_size=3, vocab_size=9, max_tokens=9),
        vocab_size=9,
        max_tokens=9,
    )
    all_estimates = []
    for trajectory in batch.trajectories:
        number = trajectory.num_sampled_tokens
        ids = np.arange(2 * number, dtype=np.int64).reshape(number, 2) + 10
        zeros = np.zeros(number, dtype=np.float32)
        all_estimates.append(
            TokenEstimates(zeros, top_ids=ids, top_logprobs=-ids.astype(np.float32))
        )
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories, all_estimates, step=0
    )
    order = range(len(sequences))
    micro_batch = packed(sequences, list(order), multiple=100, sequence_multiple=4)
    assert (
        micro_batch.top_ids.shape
        == micro_batch.top_logprobs.shape
        == (len(micro_batch.token_ids), 2)
    )
    mask = micro_batch.loss_mask
    expected = np.concatenate([estimate.top_ids for estimate in all_estimates])
    assert micro_batch.top_ids[mask].tolist() == expected.tolist()
    assert micro_batch.top_logprobs[mask].tolist() == (-expected).tolist()
    assert not micro_batch.top_ids[~mask].any()
    assert micro_batch.all_targets[:, 0].tolist() == micro_batch.targets.tolist()
    assert micro_batch.all_targets[:, 1:].tolist() == micro_batch.top_ids.tolist()
    # A rank whose share of a mini-batch is empty has as many targets as the others.
    assert packed(sequences, [], multiple=8).all_targets.shape == (8, 3)


def test_every_sequence_is_padded_at_its_end_without_loss() -> None:
    first = sequence([5, 6, 7], [False, True, True], 0.5)
    second = sequence([8, 9], [False, True], -1.0)
    micro_batch = packed([first, second], [0, 1], multiple=8, sequence_multiple=4)
    assert micro_batch.token_ids.tolist() == [5, 6, 7, 0, 8, 9, 0, 0]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert micro_batch.targets.tolist() == [6, 7, 0, 0, 9, 0, 0, 0]
    assert micro_batch.loss_mask.tolist() == [
        True,
        True,
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert micro_batch.behavior_logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5, 0, 0, 0]
    assert micro_batch.lags.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert micro_batch.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert micro_batch.cu_seqlens.tolist() == [0, 4, 8]
    assert micro_batch.max_seqlen == 4
    assert micro_batch.indices == (0, 1)
    assert micro_batch.advantages[micro_batch.loss_mask].tolist() == [0.5, 0.5, -1.0]
    filled = packed([first], [0], multiple=8, sequence_multiple=4)
    assert filled.cu_seqlens.tolist() == [0, 4, 8]


def test_empty_micro_batch_is_one_token_of_filler() -> None:
    micro_batch = packed([], [])
    assert micro_batch.token_ids.tolist() == [0]
    assert micro_batch.loss_mask.tolist() == [False]
    assert micro_batch.cu_seqlens.tolist() == [0, 1]


@given(seed=st.integers(0, 1000), multiple=st.integers(1, 8))
def test_micro_batch_trains_each_sampled_token_where_it_is_predicted(seed, multiple):
    batch = make_batch(seed, num_groups=2, group_size=3, vocab_size=99, max_tokens=20)
    all_estimates = [
        estimates(t.num_sampled_tokens, t.reward - 0.5) for t in batch.trajectories
    ]
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories, all_estimates, step=batch.step
    )
    micro_batch = packed(sequences, range(6), multiple=multiple)
    assert len(micro_batch.token_ids) % multiple == 0
    mask = micro_batch.loss_mask
    sampled = [t.token_ids[t.sampled_mask()] for t in batch.trajectories]
    assert micro_batch.targets[mask].tolist() == np.concatenate(sampled).tolist()
    behavior = np.concatenate([t.behavior_logprobs for t in batch.trajectories])
    assert micro_batch.behavior_logprobs[mask].tolist() == behavior.tolist()
    versions = [
        seed - span.version.step
        for t in batch.trajectories
        for span in t.version_spans
        for _ in range(span.length)
    ]
    assert micro_batch.lags[mask].tolist() == versions


def test_branches_of_a_batch_are_those_of_each_branch_alone() -> None:
    batch_made = make_batch(3, num_groups=2, group_size=3, vocab_size=99, max_tokens=20)
    batch = with_branches(batch_made, vocab_size=99, max_tokens=20)
    assert len(batch.owners) > 6
    all_estimates = [
        estimates(t.num_sampled_tokens, t.reward - 0.5) for t in batch.trajectories
    ]
    together = iter(
        TrainingSequence.of_trajectories(batch.trajectories, all_estimates, step=3)
    )
    for trajectory in batch.trajectories:
        lags = token_lags([trajectory], 3)
        for part in trajectory.sequences:
            values = next(together)
            sampled = trajectory.sampled_mask()[part.tokens]
            assert (
                values.token_ids.tolist() == trajectory.token_ids[part.tokens].tolist()
            )
            assert values.loss_mask.tolist() == [*sampled[1:], False]
            behavior = trajectory.behavior_logprobs[part.sampled]
            assert (
                values.behavior_logprobs[values.loss_mask].tolist() == behavior.tolist()
            )
            assert values.lags[values.loss_mask].tolist() == lags[part.sampled].tolist()
    assert next(together, None) is None
    assert TrainingSequence.of_trajectories([], [], step=3) == []


def test_token_sampled_without_any_context_is_left_out_of_each_branch() -> None:
    trajectory = make_batch(
        0, num_groups=1, group_size=1, vocab_size=9, max_tokens=4
    ).trajectories[0]
    tree = dataclasses.replace(
        trajectory,
        token_ids=np.arange(7, dtype=np.uint32),
        run_lengths=(0, 3, 0, 4),
        behavior_logprobs=-np.arange(7, dtype=np.float32),
        version_spans=(trajectory.version_spans[0]._replace(length=7),),
        branches=(Branch(2), Branch(2)),
    )
    first, second = TrainingSequence.of_trajectories(
        [tree], [estimates(7, 1.0)], step=0
    )
    assert first.behavior_logprobs.tolist() == [-1, -2, 0]
    assert first.loss_mask.tolist() == [True, True, False]
    assert second.behavior_logprobs.tolist() == [-4, -5, -6, 0]
    assert second.loss_mask.tolist() == [True, True, True, False]
