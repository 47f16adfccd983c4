from __future__ import annotations

import math

import pytest
import torch
from slipstream.learner.trainer.algorithms.loss import policy_loss
from slipstream.learner.trainer.algorithms.statistics import StepStatistics
from support.fakes.packed import algorithm, micro_batch


class OneRank:
    """Ranks of a world of one: sums over all are its own."""

    counts = True

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


def found(behavior: list[float], lags: list[int]):
    batch = micro_batch(behavior, lags=lags)
    return policy_loss(
        torch.zeros(len(lags)), torch.zeros(len(lags)), None, batch, algorithm(), group=None
    ).statistics


def test_step_adds_up_its_mini_batches() -> None:
    step = StepStatistics()
    # Ratios 1 and 4 (cut to 2), then 1: weights 1, 2, 1.
    assert step.add([found([0.0, -math.log(4)], [0, 1])], OneRank()) == pytest.approx(-3)
    assert step.add([found([0.0], [0])], OneRank()) == pytest.approx(-1)
    metrics = step.metrics()
    assert metrics["loss"] == pytest.approx(-4 / 3)
    assert metrics["trained_tokens"] == 3
    assert metrics["importance_weight_mean"] == pytest.approx(4 / 3)
    assert metrics["importance_ratio_max"] == pytest.approx(4)
    assert metrics["importance_capped_fraction"] == pytest.approx(1 / 3)
    assert metrics["effective_sample_size"] == pytest.approx(4**2 / (3 * 6))
    assert metrics["logprob_gap_mean"] == 0
    assert metrics["logprob_gap_tokens"] == 2
    assert metrics["logprob_gap_lag_1"] == pytest.approx(math.log(4))
    assert "logprob_gap_lag_2" not in metrics


def test_metrics_of_sampled_tokens_leave_out_given_ones() -> None:
    alone, beside = StepStatistics(), StepStatistics()
    alone.add([found([0.1, -math.log(4)], [0, 1])], OneRank())
    beside.add([found([math.nan, 0.1, -math.log(4), math.nan], [0, 0, 1, 1])], OneRank())
    ours, theirs = beside.metrics(), alone.metrics()
    assert (ours.pop("trained_tokens"), theirs.pop("trained_tokens")) == (4, 2)
    # The loss of each given token is -1: its ratio and its advantage are 1.
    assert ours.pop("loss") == pytest.approx((2 * theirs.pop("loss") - 2) / 4)
    assert ours == theirs


def test_tokens_of_several_passes_are_counted_once() -> None:
    once, twice = StepStatistics(), StepStatistics(epochs=2)
    for step in (once, twice, twice):
        step.add([found([0.0, -math.log(4)], [0, 1])], OneRank())
    assert twice.metrics() == once.metrics()


def test_step_without_a_trained_token_has_finite_metrics() -> None:
    step = StepStatistics()
    nothing = micro_batch([0.0], mask=[False])
    zeros = torch.zeros(1)
    loss = policy_loss(zeros, zeros, None, nothing, algorithm(), group=None)
    assert step.add([loss.statistics], OneRank()) == 0
    assert all(math.isfinite(value) for value in step.metrics().values())
