from dataclasses import replace

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.types import GroupId
from support.fakes.fake_controller import make_batch


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
