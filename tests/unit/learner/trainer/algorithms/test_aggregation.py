from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.learner.trainer.algorithms.sequences import loss_weights

LOSSES = [[1.0, 2.0, 6.0], [10.0], []]


def aggregated(losses: list[list[float]], kind: str, fixed_tokens: int = 4) -> float:
    weights = loss_weights([len(one) for one in losses], kind, fixed_tokens=fixed_tokens)
    total = sum(w * sum(one) for w, one in zip(weights, losses, strict=True))
    return total / sum(len(one) for one in losses)


def test_token_mean_counts_each_token_alike() -> None:
    assert aggregated(LOSSES, "token_mean") == pytest.approx(19 / 4)


def test_sequence_mean_is_the_mean_of_the_means_of_sequences_with_a_trained_token() -> None:
    assert aggregated(LOSSES, "sequence_mean") == pytest.approx((3 + 10) / 2)


def test_fixed_divides_by_a_constant_length_of_every_sequence() -> None:
    assert aggregated(LOSSES, "fixed") == pytest.approx(19 / (3 * 4))


def test_mini_batch_without_a_trained_token_has_weights() -> None:
    for kind in ("token_mean", "sequence_mean", "fixed"):
        assert np.isfinite(loss_weights([0, 0], kind, fixed_tokens=4)).all()


@settings(deadline=None)
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
    means = [one.mean() for one in losses if len(one)]
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "sequence_mean": np.mean(means),
        "fixed": np.concatenate(losses).sum() / (5 * len(lengths)),
    }
    assert sum(parts) / sum(lengths) == pytest.approx(expected[kind])
