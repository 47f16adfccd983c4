from __future__ import annotations

from dataclasses import replace

import pytest
from slipstream.core.errors import RunFailed, StalenessError
from slipstream.core.types import (
    Failure,
    FailureKind,
    GroupId,
    PolicyVersion,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.trainer.batches.batch import Batch, token_lags
from support.fakes.fake_controller import make_batch


def batch_of(step: int, *spans: tuple[VersionSpan, ...]) -> Batch:
    """One trajectory for each entry of `spans`, which also say how many tokens it has sampled."""
    made = make_batch(step, num_groups=1, group_size=len(spans), vocab_size=8, max_tokens=9)
    return replace(
        made,
        trajectories=tuple(with_spans(t, s) for t, s in zip(made.trajectories, spans, strict=True)),
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
    batch_of(7, (span(2, 5), span(1, 7))).check(2)


def test_token_older_than_max_staleness_is_refused() -> None:
    with pytest.raises(StalenessError, match="lag of 3"):
        batch_of(7, (span(1, 7),), (span(2, 4), span(1, 7))).check(2)


def test_token_of_a_later_version_is_refused() -> None:
    with pytest.raises(StalenessError, match="lag of -1"):
        batch_of(7, (span(1, 8),)).check(2)


def test_older_incarnation_counts_by_its_step_alone() -> None:
    batch_of(7, (VersionSpan(2, PolicyVersion(1, 6)),)).check(1)


def test_trajectory_without_a_reward_is_refused() -> None:
    batch = batch_of(0, (span(1, 0),))
    gone = Failure(FailureKind.ENGINE, "gone")
    failed = replace(batch.trajectories[0], status=Status.FAILED, failure=gone)
    with pytest.raises(RunFailed, match="FAILED"):
        replace(batch, trajectories=(failed,)).check(0)


def test_mini_batches_take_equal_shares_of_the_groups_in_order() -> None:
    batch = make_batch(0, num_groups=4, group_size=2, vocab_size=8, max_tokens=9)
    assert batch.mini_batches(1) == [list(range(8))]
    assert batch.mini_batches(2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.mini_batches(4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_mini_batch_keeps_a_group_whole_that_does_not_stand_together() -> None:
    made = make_batch(0, num_groups=1, group_size=4, vocab_size=8, max_tokens=9)
    trajectories = tuple(
        replace(t, group_id=GroupId(name))
        for t, name in zip(made.trajectories, "abab", strict=True)
    )
    assert replace(made, trajectories=trajectories).mini_batches(2) == [[0, 2], [1, 3]]


def test_more_mini_batches_than_groups_are_refused() -> None:
    with pytest.raises(RunFailed, match="2 groups are too few for 3"):
        make_batch(0, num_groups=2, group_size=2, vocab_size=8, max_tokens=9).mini_batches(3)


def test_each_adapter_has_the_groups_that_it_sampled() -> None:
    batch = make_batch(3, num_groups=4, group_size=2, vocab_size=8, max_tokens=9)
    names = ["math", "code", "math", "code"]
    batch = replace(
        batch,
        trajectories=tuple(
            replace(t, adapter=names[place // 2]) for place, t in enumerate(batch.trajectories)
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
    with pytest.raises(RunFailed, match="is of adapter 'math', but lora.adapters are 'code'"):
        batch.by_adapter(["code"])


def test_a_batch_without_adapters_is_one_part() -> None:
    batch = make_batch(3, num_groups=2, group_size=2, vocab_size=8, max_tokens=9)
    assert batch.by_adapter([""]) == [("", batch)]
