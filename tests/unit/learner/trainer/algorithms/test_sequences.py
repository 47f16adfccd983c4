import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from slipstream.core.types import (
    Branch,
    PolicyVersion,
    ReferenceLogprobs,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.trainer.algorithms.loss import (
    ModelEstimates,
    loss_weights,
    mean_advantages,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes import own_grpo
from support.fakes.fake_controller import make_batch
from support.fakes.packed import packed
from support.fakes.small_configs import small_config


def said(logprobs: np.ndarray) -> ReferenceLogprobs:
    """What a reference says of sampled tokens alone."""
    nothing = np.zeros((len(logprobs), 0))
    return ReferenceLogprobs(
        logprobs, nothing.astype(np.uint32), nothing.astype(np.float32)
    )


def config(**algorithm):
    tables: dict[str, JsonValue] = {}
    if algorithm.get("advantage") == "gae":
        tables["critic"] = {"learning_rate": 1e-3}
    sampling = {"max_reply_tokens": 10, "max_episode_tokens": 64}
    return small_config(
        algorithm={"group_size": 3} | algorithm, sampling=sampling, **tables
    )


def batch(rewards: list[float], truncated: tuple[int, ...] = ()) -> Batch:
    batch = make_batch(0, num_groups=2, group_size=3, vocab_size=9, max_tokens=20)
    changed = [
        dataclasses.replace(
            t,
            reward=reward,
            status=Status.TRUNCATED if i in truncated else Status.COMPLETED,
        )
        for i, (t, reward) in enumerate(zip(batch.trajectories, rewards, strict=True))
    ]
    return Batch(0, batch.batch_id, tuple(changed))


def advantages(sequences) -> list[float]:
    """The advantage of each sequence, which all its trained tokens share."""
    found = []
    for sequence in sequences:
        values = set(sequence.advantages[sequence.loss_mask].tolist())
        assert len(values) == 1
        found.append(values.pop())
    return found


def test_the_advantage_that_is_told_is_the_mean_of_a_trajectorys_trained_tokens() -> (
    None
):
    batch_made = batch([0, 1, 2, 5, 5, 8], truncated=(2,))
    two = dataclasses.replace(
        tree((1, 3), (1.0, 0.5), 0.0), group_id=batch_made.group_ids[0]
    )
    batch_made = Batch(0, batch_made.batch_id, (two, *batch_made.trajectories[1:]))
    sequences = training_sequences(
        batch_made, config(advantage="dr_grpo", leave_out_truncated=True)
    )
    advantages = mean_advantages(batch_made, sequences)
    ids = [trajectory.trajectory_id for trajectory in batch_made.trajectories]
    # The rewards are 0 and 1: one token has -0.5, three of the other branch have half of it.
    assert [advantages.get(trajectory_id) for trajectory_id in ids] == pytest.approx(
        [(-0.5 - 3 * 0.25) / 4, 0.5, None, -1, -1, 2]
    )


def test_reports_of_episodes_are_collected() -> None:
    reports: dict[str, list[float]] = {}
    settings = config(reward="support.fakes.own_grpo:reward")
    training_sequences(
        batch([0, 1, 2, 5, 5, 8], truncated=(2,)), settings, reports=reports
    )
    assert reports == {"own_reward": [0, 1, 2, 5, 5, 8]}


def tree(
    sampled: tuple[int, ...], shares: tuple[float, ...], reward: float
) -> Trajectory:
    """A branch for each number of sampled tokens, behind two tokens of context."""
    trajectory = make_batch(
        0, num_groups=1, group_size=1, vocab_size=9, max_tokens=20
    ).trajectories[0]
    total = sum(sampled)
    runs = tuple(run for number in sampled for run in (2, number))
    return dataclasses.replace(
        trajectory,
        token_ids=np.arange(sum(runs), dtype=np.uint32),
        run_lengths=runs,
        behavior_logprobs=-np.arange(total, dtype=np.float32),
        version_spans=(VersionSpan(total, PolicyVersion(0, 0)),),
        reward=reward,
        branches=tuple(Branch(2, share) for share in shares),
    )


def test_each_branch_is_a_sequence_with_the_episodes_advantage_times_its_share() -> (
    None
):
    plain = batch([0, 1, 2, 5, 5, 8])
    of_group = dataclasses.replace(tree((3, 1, 2), (1.0, 0.5, -2.0), 2.0), member=2)
    of_group = dataclasses.replace(of_group, group_id=plain.group_ids[2])
    trees = (*plain.trajectories[:2], of_group, *plain.trajectories[3:])
    mixed = dataclasses.replace(plain, trajectories=trees)
    assert mixed.owners == [0, 1, 2, 2, 2, 3, 4, 5]
    assert mixed.lengths[2:5] == [5, 3, 4]
    assert mixed.mini_batches(2) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    sequences = training_sequences(mixed, config(advantage="dr_grpo"))
    assert advantages(sequences) == pytest.approx([-1, 0, 1, 0.5, -2, -1, -1, 2])
    first, second, third = sequences[2:5]
    assert first.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert third.token_ids.tolist() == [8, 9, 10, 11]
    # Nothing is predicted across the end of a branch.
    assert first.loss_mask.tolist() == [False, True, True, True, False]
    assert second.loss_mask.tolist() == [False, True, False]
    assert third.behavior_logprobs.tolist() == [0, -4, -5, 0]
    weighted_sequences = weighted(
        sequences, mixed, mixed.mini_batches(1), config(aggregation="sequence_mean")
    )
    counts = [int(sequence.loss_mask.sum()) for sequence in sequences]
    assert [w.loss_weight for w in weighted_sequences] == [
        sum(counts) / (8 * count) for count in counts
    ]


def test_a_single_branch_is_trained_as_an_episode_without_branches_bit_for_bit() -> (
    None
):
    plain = batch([0, 1, 2, 5, 5, 8])
    copies = [
        dataclasses.replace(t, branches=(Branch(len(t.run_lengths)),))
        for t in plain.trajectories
    ]
    settings = config(advantage="reinforce_pp")
    first = training_sequences(plain, settings)
    second = training_sequences(
        dataclasses.replace(plain, trajectories=tuple(copies)), settings
    )
    for sequence, other in zip(first, second, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "lags"):
            assert getattr(sequence, name).tobytes() == getattr(other, name).tobytes()
        assert sequence.advantages.tobytes() == other.advantages.tobytes()


def test_overlong_filter_takes_all_branches_of_an_episode_out_of_the_loss() -> None:
    cut = dataclasses.replace(tree((3, 1), (1.0, 1.0), 2.0), status=Status.TRUNCATED)
    mixed = Batch(0, "batch", (cut, *batch([0, 1, 2, 5, 5, 8]).trajectories))
    sequences = training_sequences(mixed, config(leave_out_truncated=True))
    assert [bool(sequence.loss_mask.any()) for sequence in sequences] == [
        False,
        False,
    ] + [True] * 6


def test_estimates_of_other_models_are_cut_into_branches() -> None:
    batch = Batch(0, "batch", (tree((3, 2), (1.0, 1.0), 1.0),))
    values = np.array([1, 2, 3, 4, 5], dtype=np.float32)
    settings = config(advantage="gae", advantage_args={"lam": 1, "normalize": False})
    first, second = training_sequences(
        batch, settings, [ModelEstimates(said(values), values)]
    )
    for known in (first.values, first.reference_logprobs):
        assert known.tolist() == [0, 1, 2, 3, 0]
    assert second.values.tolist() == [0, 4, 5, 0]
    assert second.returns[1:3].tolist() == [1.0, 1.0]


def test_overlong_filter_takes_episodes_out_of_the_loss_and_out_of_their_groups_mean() -> (
    None
):
    settings = config(advantage="dr_grpo", leave_out_truncated=True)
    sequences = training_sequences(batch([0, 1, 2, 5, 5, 8], truncated=(2,)), settings)
    assert not sequences[2].loss_mask.any()
    assert advantages(sequences[:2] + sequences[3:]) == pytest.approx(
        [-0.5, 0.5, -1, -1, 2]
    )
    all_sequences = training_sequences(
        batch([0, 1, 2, 5, 5, 8], truncated=(2,)), config(advantage="dr_grpo")
    )
    assert advantages(all_sequences)[:3] == pytest.approx([-1, 0, 1])


def test_divergence_in_the_reward_costs_what_the_sampler_diverged_from_the_reference() -> (
    None
):
    equal_batch = batch([0, 0, 0, 0, 0, 0])
    # The reference is log 2 less sure of the first episode's tokens: k1 costs 0.1 * log 2 for each.
    estimates = [
        ModelEstimates(said(t.behavior_logprobs - (math.log(2) if i == 0 else 0.0)))
        for i, t in enumerate(equal_batch.trajectories)
    ]
    cost = 0.1 * math.log(2) * equal_batch.trajectories[0].num_sampled_tokens
    kl: JsonValue = {"coefficient": 0.1, "placement": "reward", "estimator": "k1"}
    settings = config(kl=kl, advantage="dr_grpo")
    values = advantages(training_sequences(equal_batch, settings, estimates))
    assert values[:3] == pytest.approx([-cost * 2 / 3, cost / 3, cost / 3], rel=1e-5)
    assert values[3:] == [0, 0, 0]


def test_weights_of_the_loss_belong_to_the_mini_batch() -> None:
    whole = batch([0, 1, 2, 5, 5, 8])
    sequences = training_sequences(whole, config())
    counts = [int(sequence.loss_mask.sum()) for sequence in sequences]
    halves = [[0, 1, 2], [3, 4, 5]]
    weighted_sequences = weighted(
        sequences, whole, halves, config(aggregation="sequence_mean", mini_batches=2)
    )
    for half in halves:
        total = sum(counts[i] for i in half)
        for i in half:
            assert weighted_sequences[i].loss_weight == pytest.approx(
                total / (3 * counts[i])
            )
    fixed = weighted(sequences, whole, [range(6)], config(aggregation="fixed"))
    assert fixed[0].loss_weight == pytest.approx(sum(counts) / (6 * 10))


def sided(rewards, names, *, reward=0.0):
    """A branch of two sampled tokens for each name."""
    tree_made = tree((2,) * len(names), (1.0,) * len(names), reward)
    branches = tuple(Branch(2, 1.0, n, r) for n, r in zip(names, rewards, strict=True))
    return dataclasses.replace(tree_made, branches=branches)


def group_of(*members: Trajectory) -> Batch:
    numbered = [dataclasses.replace(t, member=n) for n, t in enumerate(members)]
    return Batch(0, "b000000", tuple(numbered))


def test_each_side_is_compared_with_the_same_side_of_its_group() -> None:
    names = ("a", "b", "a", "")
    group = group_of(
        sided((3.0, 10.0, 3.0, None), names, reward=1.0),
        sided((0.0, 30.0, 0.0, None), names, reward=2.0),
        sided((0.0, 20.0, 0.0, None), names, reward=6.0),
    )
    sequences = training_sequences(group, config(advantage="dr_grpo"))
    assert advantages(sequences) == pytest.approx(
        [2, -10, 2, -2, -1, 10, -1, -1, -1, 0, -1, 3]
    )
    sequences = training_sequences(group, config(advantage="rloo"))
    assert advantages(sequences) == pytest.approx(
        [3, -15, 3, -3, -1.5, 15, -1.5, -1.5, -1.5, 0, -1.5, 4.5]
    )


def test_a_side_that_only_some_members_have_is_compared_among_these() -> None:
    group = group_of(
        sided((1.0, 4.0), ("a", "b")),
        sided((3.0,), ("a",)),
        sided((5.0, 8.0), ("a", "b")),
    )
    sequences = training_sequences(group, config(advantage="dr_grpo"))
    assert advantages(sequences) == pytest.approx([-2, -2, 0, 2, 2])


def test_values_and_returns_of_a_side_are_those_of_its_tokens() -> None:
    group = group_of(sided((1.0, 5.0, 1.0), ("a", "b", "a")))
    values = np.array([0, 1, 2, 3, 4, 5], dtype=np.float32)
    gae: JsonValue = {"lam": 1.0, "normalize": False}
    sequences = training_sequences(
        group,
        config(advantage="gae", advantage_args=gae),
        [ModelEstimates(values=values)],
    )
    first, second, third = (
        sequence.advantages[sequence.loss_mask].tolist() for sequence in sequences
    )
    assert (first, second, third) == ([1, 0], [3, 2], [-3, -4])


def test_one_reward_for_all_sides_trains_as_the_episodes_own_bit_for_bit() -> None:
    rewards = [0.3, 0.1, 0.7]
    plain = group_of(*(sided((None,), ("",), reward=r) for r in rewards))
    group = group_of(*(sided((r,), ("a",), reward=9.0) for r in rewards))
    for advantage in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "score"):
        settings = config(advantage=advantage)
        first, second = (
            training_sequences(batch_of_group, settings)
            for batch_of_group in (plain, group)
        )
        for sequence, other in zip(first, second, strict=True):
            assert sequence.advantages.tobytes() == other.advantages.tobytes()


BY_TURN: dict[str, JsonValue] = {
    "advantage": "return_to_go",
    "advantage_args": {"normalize": False},
}


def earning(
    *earned: float, branches: tuple[Branch, ...] = (), reward: float | None = None
):
    """An episode of turns of 1, 2 and 1 tokens, two tokens of context before each."""
    total = float(np.sum(earned)) if reward is None else reward
    return dataclasses.replace(
        tree((1, 2, 1), (1.0,) * 3, total),
        branches=branches,
        token_rewards=np.array(earned, dtype=np.float32),
    )


def by_prediction(sequences) -> list[list[float]]:
    return [sequence.advantages[sequence.loss_mask].tolist() for sequence in sequences]


def test_rewards_of_turns_reach_the_tokens_of_their_turns() -> None:
    group = group_of(earning(1, 0, 4, 0), earning(0, 0, 0, 2), earning(0, 2, 0, 0))
    # Returns of the turns: 5 4 0, 2 2 2 and 2 2 0; the second token of the last has earned already.
    expected = [
        [2, 4 / 3, 4 / 3, -2 / 3],
        [-1, -2 / 3, -2 / 3, 4 / 3],
        [-1, -2 / 3, -8 / 3, -2 / 3],
    ]
    sequences = training_sequences(group, config(**BY_TURN))
    for ours, theirs in zip(by_prediction(sequences), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    # Packed with others in any order, each target keeps its own.
    batch = packed(sequences, [2, 0, 1])
    ours = batch.advantages[batch.loss_mask].tolist()
    assert ours == pytest.approx([*expected[2], *expected[0], *expected[1]], abs=1e-6)
    backwards = training_sequences(
        Batch(0, "b", group.trajectories[::-1]), config(**BY_TURN)
    )
    for sequence, same in zip(sequences, backwards[::-1], strict=True):
        assert sequence.advantages == pytest.approx(same.advantages, abs=1e-6)


def test_a_change_of_the_reward_counts_at_the_end() -> None:
    settings = config(reward="support.fakes.own_grpo:halved", **BY_TURN)
    sequences = training_sequences(
        group_of(earning(1, 0, 4, 0), earning(0, 0, 0, 0)), settings
    )
    # 5 became 2.5, so the last turn lost 2.5: returns 2.5, 1.5, -2.5 and 0, 0, 0.
    assert by_prediction(sequences)[0] == pytest.approx([1.25, 0.75, 0.75, -1.25])


def test_turns_of_branches_and_sides_are_compared_with_their_like() -> None:
    sides = (Branch(4, name="a", reward=5.0), Branch(2))
    other = (Branch(4, name="a", reward=1.0), Branch(2))
    group = group_of(
        earning(1, 0, 4, 3, branches=sides, reward=3.0),
        earning(0, 0, 1, 1, branches=other, reward=1.0),
    )
    advantages = by_prediction(training_sequences(group, config(**BY_TURN)))
    assert advantages == [[2, 1.5, 1.5], [1], [-2, -1.5, -1.5], [-1]]
    # Branches that share a reward: what the second earned follows the first.
    shared = (Branch(4), Branch(2))
    group = group_of(
        earning(1, 0, 4, 3, branches=shared), earning(0, 0, 1, 1, branches=shared)
    )
    advantages = by_prediction(training_sequences(group, config(**BY_TURN)))
    assert advantages == [[3, 2.5, 2.5], [1], [-3, -2.5, -2.5], [-1]]


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "score"]
)
def test_what_compares_episodes_has_the_bits_of_their_sums(advantage: str) -> None:
    spread = group_of(earning(1, 0, 4, 0.25), earning(0, 0, 0, 2), earning(0, 2, 0, 0))
    summed = [dataclasses.replace(t, token_rewards=None) for t in spread.trajectories]
    settings = config(advantage=advantage)
    first, second = (
        training_sequences(b, settings) for b in (spread, group_of(*summed))
    )
    for values, other in zip(first, second, strict=True):
        assert values.advantages.tobytes() == other.advantages.tobytes()


def test_a_turn_says_what_was_read_before_it_and_what_was_sampled() -> None:
    own_grpo.SEEN.clear()
    nothing = dataclasses.replace(
        earning(0, 0, 0, 0), run_lengths=(2, 1, 2, 0, 2, 2, 2, 1)
    )
    nothing = dataclasses.replace(nothing, token_ids=np.arange(12, dtype=np.uint32))
    training_sequences(
        group_of(nothing), config(advantage="support.fakes.own_grpo:seen")
    )
    (episode,) = own_grpo.SEEN
    assert [turn.span for turn in episode.turns] == [
        slice(0, 1),
        slice(1, 3),
        slice(3, 4),
    ]
    assert [turn.context.tolist() for turn in episode.turns] == [
        [0, 1],
        [3, 4, 5, 6],
        [9, 10],
    ]
    assert [turn.reply.tolist() for turn in episode.turns] == [[2], [7, 8], [11]]
    with pytest.raises(ValueError, match="read-only"):
        episode.turns[0].context[0] = 1


def test_mini_batch_without_a_trained_token_has_weights() -> None:
    for kind in ("token_mean", "sequence_mean", "fixed"):
        assert np.isfinite(loss_weights([0, 0], kind, fixed_tokens=4)).all()


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    kind=st.sampled_from(["token_mean", "sequence_mean", "fixed"]),
    seed=st.integers(0, 99),
)
def test_sums_of_any_parts_over_all_tokens_are_the_aggregate_of_the_whole(
    lengths: list[int], cuts: list[int], kind: str, seed: int
) -> None:
    """Whatever micro batches and ranks the sequences are dealt to: no mean of local means."""
    random = np.random.default_rng(seed)
    losses = [random.normal(size=length) for length in lengths]
    weights = loss_weights(lengths, kind, fixed_tokens=5)
    bounds = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    parts = [
        sum(weights[i] * losses[i].sum() for i in range(a, b))
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    means = [loss.mean() for loss in losses if len(loss)]
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "sequence_mean": np.mean(means),
        "fixed": np.concatenate(losses).sum() / (5 * len(lengths)),
    }
    assert sum(parts) / sum(lengths) == pytest.approx(expected[kind])
