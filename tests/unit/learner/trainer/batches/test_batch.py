"""The trajectories of a step: mini-batches, adapters, and checks of the data."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from slipstream.core.errors import RunFailed, StalenessError, UntrainableBatch
from slipstream.core.types import GroupId, PolicyVersion, Trajectory, VersionSpan
from slipstream.learner.trainer.batches.batch import (
    Batch,
    check_advantages,
    check_data,
    check_staleness,
    untrainable,
)
from slipstream.learner.trainer.batches.training_sequence import (
    TokenEstimates,
    TrainingSequence,
    token_lags,
)
from support.fakes.fake_controller import make_batch, with_branches

BATCH = make_batch(0, num_groups=2, group_size=2, vocab_size=32, max_tokens=24)


def test_mini_batches_take_equal_shares_of_the_groups_in_order() -> None:
    batch = make_batch(0, num_groups=4, group_size=2, vocab_size=8, max_tokens=9)
    assert batch.mini_batches(1) == [list(range(8))]
    assert batch.mini_batches(2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.mini_batches(4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_mini_batch_keeps_a_group_whole_that_does_not_stand_together() -> None:
    batch = make_batch(0, num_groups=1, group_size=4, vocab_size=8, max_tokens=9)
    trajectories = tuple(
        replace(t, group_id=GroupId(name))
        for t, name in zip(batch.trajectories, "abab", strict=True)
    )
    assert replace(batch, trajectories=trajectories).mini_batches(2) == [[0, 2], [1, 3]]


def test_more_mini_batches_than_groups_are_refused_or_fewer() -> None:
    few = make_batch(0, num_groups=2, group_size=2, vocab_size=8, max_tokens=9)
    with pytest.raises(RunFailed, match="2 groups are too few for 3"):
        few.mini_batches(3)
    assert few.mini_batches(3, or_fewer=True) == few.mini_batches(2)
    assert few.mini_batches(1, or_fewer=True) == [[0, 1, 2, 3]]


def test_each_adapter_has_the_groups_that_it_sampled() -> None:
    batch = make_batch(3, num_groups=4, group_size=2, vocab_size=8, max_tokens=9)
    names = ["math", "code", "math", "code"]
    batch = replace(
        batch,
        trajectories=tuple(
            replace(t, adapter=names[place // 2])
            for place, t in enumerate(batch.trajectories)
        ),
    )
    parts = batch.by_adapter(["code", "idle", "math"])
    assert [name for name, _ in parts] == ["code", "math"]
    groups = batch.group_ids
    assert [part.group_ids for _, part in parts] == [
        groups[2:4] + groups[6:8],
        groups[:2] + groups[4:6],
    ]
    assert {(part.step, part.batch_id) for _, part in parts} == {(3, batch.batch_id)}
    with pytest.raises(
        RunFailed, match="is of adapter 'math', but lora.adapters are 'code'"
    ):
        batch.by_adapter(["code"])


def test_a_batch_without_adapters_is_one_part() -> None:
    batch = make_batch(3, num_groups=2, group_size=2, vocab_size=8, max_tokens=9)
    assert batch.by_adapter([""]) == [("", batch)]


def batch_of(step: int, *spans: tuple[VersionSpan, ...]) -> Batch:
    """One trajectory for each entry of `spans`, which also say how many tokens it has sampled."""
    batch = make_batch(
        step, num_groups=1, group_size=len(spans), vocab_size=8, max_tokens=9
    )
    return replace(
        batch,
        trajectories=tuple(
            with_spans(t, s) for t, s in zip(batch.trajectories, spans, strict=True)
        ),
    )


def with_spans(trajectory: Trajectory, spans: tuple[VersionSpan, ...]) -> Trajectory:
    sampled = sum(span.length for span in spans)
    return replace(
        trajectory,
        version_spans=spans,
        run_lengths=(2, sampled),
        token_ids=trajectory.token_ids.repeat(9)[: 2 + sampled],
        behavior_logprobs=trajectory.behavior_logprobs.repeat(9)[:sampled],
        reward=1.0,
    )


def span(length: int, step: int) -> VersionSpan:
    return VersionSpan(length, PolicyVersion(0, step))


def test_lag_of_a_token_is_the_step_less_the_version_that_sampled_it() -> None:
    batch = batch_of(7, (span(2, 5), span(1, 7)))
    assert token_lags(batch.trajectories[:1], 7).tolist() == [2, 2, 0]


def test_lag_up_to_max_staleness_passes() -> None:
    check_staleness(batch_of(7, (span(2, 5), span(1, 7))), 2)
    # An older incarnation counts by its step alone.
    check_staleness(batch_of(7, (VersionSpan(2, PolicyVersion(1, 6)),)), 1)


@pytest.mark.parametrize(
    ("spans", "lag"),
    [(((span(1, 7),), (span(2, 4), span(1, 7))), 3), (((span(1, 8),),), -1)],
)
def test_token_of_an_older_or_a_later_version_is_refused(spans, lag):
    with pytest.raises(StalenessError, match=f"lag of {lag}"):
        check_staleness(batch_of(7, *spans), 2)


def ids(*indices: int) -> tuple[str, ...]:
    return tuple(BATCH.trajectories[index].trajectory_id for index in indices)


def changed(batch: Batch, **fields: dict[int, object]) -> Batch:
    """The batch with other values of some trajectories, by field and index."""
    trajectories = list(batch.trajectories)
    for name, values in fields.items():
        for index, value in values.items():
            trajectories[index] = dataclasses.replace(
                trajectories[index], **{name: value}
            )
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


def sequences_with(advantages: list[float]) -> list[TrainingSequence]:
    estimates = [
        TokenEstimates(np.full(t.num_sampled_tokens, a, dtype=np.float32))
        for t, a in zip(BATCH.trajectories, advantages, strict=True)
    ]
    return TrainingSequence.of_trajectories(BATCH.trajectories, estimates, step=0)


def test_a_batch_that_can_be_trained_passes() -> None:
    check_data(BATCH, max_tokens=24, multiple=1, vocab_size=32)
    check_advantages(BATCH, sequences_with([1.0, -1.0, 0.0, 3e38]))


def test_the_padded_length_must_fit() -> None:
    longest = max(len(t.token_ids) for t in BATCH.trajectories)
    check_data(BATCH, max_tokens=longest, multiple=1, vocab_size=32)
    with pytest.raises(
        UntrainableBatch, match="does not fit learner.micro_batch_tokens"
    ) as error:
        check_data(BATCH, max_tokens=longest, multiple=longest - 1, vocab_size=32)
    trajectory_ids = {
        t.trajectory_id for t in BATCH.trajectories if len(t.token_ids) == longest
    }
    assert set(error.value.trajectory_ids) == trajectory_ids


def test_tokens_outside_the_vocabulary_are_named() -> None:
    largest = [int(t.token_ids.max()) for t in BATCH.trajectories]
    with pytest.raises(
        UntrainableBatch, match=f"token {max(largest)} is outside"
    ) as error:
        check_data(BATCH, max_tokens=24, multiple=1, vocab_size=max(largest))
    indices = [index for index, token in enumerate(largest) if token == max(largest)]
    assert error.value.trajectory_ids == ids(*indices)


def test_an_advantage_that_is_not_finite_is_named() -> None:
    with pytest.raises(UntrainableBatch, match="advantages are not finite") as error:
        check_advantages(BATCH, sequences_with([0.0, 0.0, float("inf"), 0.0]))
    assert error.value.trajectory_ids == ids(2)


def test_the_message_names_the_first_few() -> None:
    assert str(untrainable(BATCH, [0], "why")) == f"why ({ids(0)[0]})"
    assert str(untrainable(BATCH, [], "why")) == "why"
    message = ", ".join(ids(0, 1, 2))
    assert str(untrainable(BATCH, [0, 1, 2, 3], "why")) == f"why ({message} and 1 more)"


def test_a_branch_must_fit_and_not_the_episode() -> None:
    trees = with_branches(BATCH, vocab_size=32, max_tokens=24)
    total = max(len(t.token_ids) for t in trees.trajectories)
    longest = max(trees.lengths)
    assert longest < total
    check_data(trees, max_tokens=longest, multiple=1, vocab_size=32)
    with pytest.raises(
        UntrainableBatch, match=f"a sequence of {longest} tokens"
    ) as error:
        check_data(trees, max_tokens=longest - 1, multiple=1, vocab_size=32)
    long = [o for o, n in zip(trees.owners, trees.lengths, strict=True) if n == longest]
    assert error.value.trajectory_ids == ids(*dict.fromkeys(long))


def test_an_episode_is_named_once_whichever_of_its_branches_are_faulty() -> None:
    trees = with_branches(BATCH, vocab_size=32, max_tokens=24)
    owner = next(o for o in trees.owners if trees.owners.count(o) > 1)
    places = [
        place for place, place_owner in enumerate(trees.owners) if place_owner == owner
    ]
    assert untrainable(trees, places, "why").trajectory_ids == ids(owner)
