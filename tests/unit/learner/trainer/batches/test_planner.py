import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.batches.planner import Plan, plan_micro_batches
from support.rigs.counted_work import counted

MAX_TOKENS = 50


def cost(length: int, attention: float) -> float:
    return length + length * length / attention


@given(
    lengths=st.lists(st.integers(1, MAX_TOKENS), max_size=60),
    dp_size=st.integers(1, 5),
    multiple=st.integers(1, 3),
    attention=st.sampled_from([5.0, 100.0, math.inf]),
)
def test_plan_deals_every_sequence_once_within_the_budget_and_equally_often(
    lengths: list[int], dp_size: int, multiple: int, attention: float
) -> None:
    plan = plan_micro_batches(
        lengths,
        max_tokens=MAX_TOKENS,
        dp_size=dp_size,
        multiple=multiple,
        attention_length=attention,
    )
    assert len(plan) == dp_size
    assert len({len(share) for share in plan}) == 1
    assert len(plan[0]) % multiple == 0
    assert len(plan[0]) >= 1
    members = [
        index for share in plan for micro_batch in share for index in micro_batch
    ]
    assert sorted(members) == list(range(len(lengths)))
    for share in plan:
        for micro_batch in share:
            assert sum(lengths[index] for index in micro_batch) <= MAX_TOKENS


@given(
    lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=60),
    dp_size=st.integers(1, 4),
)
def test_plan_needs_at_most_twice_the_fewest_possible_micro_batches(lengths, dp_size):
    plan = plan_micro_batches(lengths, max_tokens=MAX_TOKENS, dp_size=dp_size)
    assert len(plan[0]) <= -(-2 * sum(lengths) // MAX_TOKENS // dp_size) + 1


def test_long_sequence_costs_more_than_short_ones_of_as_many_tokens() -> None:
    lengths = [10, 4, 4, 4, 4]
    # Costs by tokens are 10 + 4 and 3 * 4; with attention 10 + 50 against 4 * (4 + 8).
    assert plan_micro_batches(lengths, max_tokens=99, dp_size=2) == [
        [[0, 4]],
        [[1, 2, 3]],
    ]
    plan = plan_micro_batches(lengths, max_tokens=99, dp_size=2, attention_length=2.0)
    assert plan == [[[0]], [[1, 2, 3, 4]]]


def test_budget_comes_before_balance() -> None:
    # Costs alone would put all five short sequences together.
    lengths = [9, 4, 4, 4, 4, 4]
    plan = plan_micro_batches(lengths, max_tokens=17, dp_size=2, attention_length=0.5)
    assert sorted(sum(lengths[i] for i in m) for share in plan for m in share) == [
        13,
        16,
    ]


def test_first_fit_decides_where_levelling_needs_more_micro_batches() -> None:
    # Two micro batches hold 6 + 4 and 5 + 3 + 2, and none of the levelled orders finds it.
    lengths = [6, 5, 4, 3, 2]
    plan = plan_micro_batches(lengths, max_tokens=10, dp_size=1)
    assert sorted(plan[0]) == [[0, 2], [1, 3, 4]]


def test_plan_of_fewer_sequences_than_ranks_leaves_empty_micro_batches() -> None:
    assert sorted(plan_micro_batches([7], max_tokens=10, dp_size=3)) == [
        [[]],
        [[]],
        [[0]],
    ]


def test_sequence_that_no_micro_batch_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="51 tokens does not fit"):
        plan_micro_batches([3, 51], max_tokens=50, dp_size=1)


@pytest.mark.parametrize(
    ("number", "max_tokens", "dp_size", "attention", "fill"),
    [
        (20_000, 16384, 8, 20_000.0, 0.99),
        (100_000, 8192, 64, math.inf, 0.99),
        # Two micro batches for each rank more or less are much here.
        (512, 16384, 4, 20_000.0, 0.9),
    ],
)
def test_lognormal_lengths_fill_the_micro_batches_and_level_the_ranks(
    number: int, max_tokens: int, dp_size: int, attention: float, fill: float
) -> None:
    drawn = np.random.default_rng(0).lognormal(6.5, 1.0, number)
    lengths = drawn.clip(16, max_tokens).astype(int).tolist()
    plan: Plan = []
    with counted() as work:
        plan = plan_micro_batches(
            lengths, max_tokens=max_tokens, dp_size=dp_size, attention_length=attention
        )
    # Every sequence is looked at a few times, however many others and ranks there are.
    assert work.num_lines < 60 * number
    assert sum(lengths) >= fill * max_tokens * dp_size * len(plan[0])
    loads = [
        [sum(cost(lengths[i], attention) for i in members) for members in share]
        for share in plan
    ]
    ranks = [sum(share) for share in loads]
    mean = sum(ranks) / dp_size
    assert max(ranks) <= 1.02 * mean
    # Replicas that exchange experts' tokens wait for each other in every micro batch.
    if number > 1000:
        assert sum(map(max, zip(*loads, strict=True))) <= 1.02 * mean
