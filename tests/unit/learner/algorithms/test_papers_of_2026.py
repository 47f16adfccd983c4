"""GDPO, OAPL and VESPO in deploy/algorithms, beside plain loops in float64."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from slipstream.learner.algorithms.episodes import ScoredEpisode
from slipstream.learner.algorithms.inputs import (
    BatchSums,
    LossInputs,
    SequenceSums,
)
from torch import Tensor

from deploy.algorithms import gdpo, oapl, vespo


def numbers_in(text: str) -> list[float]:
    return list(map(float, text.split()))


# Two sequences, one of which has a last token that is not trained, and one of a single token.
PLACES = {0: (0, 1, 2), 1: (3, 4), 2: (6,)}
SEQUENCE_OF_TOKENS = numbers_in("0 0 0 1 1 1 2")
IS_TRAINED = numbers_in("1 1 1 1 1 0 1")
POLICY = numbers_in("-1 -0.3 -2 -0.7 -1.6 -9 -0.2")
BEHAVIOR = numbers_in("-1.3 -0.1 -2.2 -0.5 -1 -1 -0.9")
ADVANTAGES = numbers_in("1.5 1.5 1.5 -0.8 -0.8 -0.8 0")


def column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(policy: Tensor) -> LossInputs:
    mask = column(IS_TRAINED).bool()
    zeros = torch.zeros_like(policy)
    ids = column(SEQUENCE_OF_TOKENS).long()
    return LossInputs(
        logprobs=policy,
        proximal_logprobs=policy.detach() + 3.0,
        behavior_logprobs=column(BEHAVIOR),
        advantages=column(ADVANTAGES),
        mask=mask,
        is_given=zeros.bool(),
        lags=zeros.int(),
        versions=zeros.int(),
        reference_logprobs=None,
        entropy=zeros,
        sequences=SequenceSums(
            ids,
            mask,
            number=3,
        ),
        batch=BatchSums(mask),
    )


def episode(
    group_id: str,
    reward: float,
    cost: float = 0.0,
    **metrics: float,
) -> ScoredEpisode:
    return ScoredEpisode(
        group_id,
        reward,
        np.array([cost, 0.0]),
        metrics=metrics,
    )


def test_vespo_weighs_tokens_by_a_kernel_of_their_sequences_ratio() -> None:
    policy = column(POLICY).requires_grad_()
    weights = vespo.weight(tokens_of(policy)).weights
    assert not weights.requires_grad
    for places in PLACES.values():
        ratio = 1.0
        for place in places:
            log_ratio = POLICY[place] - BEHAVIOR[place]
            ratio *= math.exp(log_ratio)
        is_positive = ADVANTAGES[places[0]] > 0
        power = 2.0 if is_positive else 3.0
        decay = 3.0 if is_positive else 2.0
        kernel = ratio**power * math.exp(-decay * ratio)
        kernel_at_1 = math.exp(-decay)
        expected = kernel / kernel_at_1
        for place in places:
            weight = weights[place].item()
            assert weight == pytest.approx(expected, rel=1e-12)


def test_vespo_is_1_on_policy_and_vanishes_far_from_it() -> None:
    policy = column(BEHAVIOR)
    on_policy = vespo.weight(tokens_of(policy))
    assert on_policy.weights.tolist() == [1.0] * 7
    for distance in (-30.0, 30.0):
        far_tokens = tokens_of(policy + distance)
        far = vespo.weight(far_tokens)
        assert far.weights.max() < 1e-12


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_oapl_has_the_value_and_gradient_of_the_papers_squares(beta: float) -> None:
    ours = column(POLICY).requires_grad_()
    losses = oapl.loss(tokens_of(ours), beta=beta)
    is_trained = column(IS_TRAINED)
    value = (losses * is_trained).sum()
    value.backward()

    theirs = column(POLICY).requires_grad_()
    behavior = column(BEHAVIOR)
    expected = torch.zeros((), dtype=torch.float64)
    for places in PLACES.values():
        own_places = list(places)
        log_ratio = (theirs - behavior)[own_places].sum()
        difference = beta * log_ratio - ADVANTAGES[places[0]]
        expected = expected + difference**2
    expected.backward()

    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert ours.grad is not None
    assert theirs.grad is not None
    gradient = theirs.grad.tolist()
    assert ours.grad.tolist() == pytest.approx(gradient, rel=1e-12)


def test_oapl_takes_the_value_of_the_best_policy_from_the_reward() -> None:
    episodes = [
        episode("a", 1.0),
        episode("a", 0.0),
        episode("b", 5.0),
        episode("a", 0.5, cost=0.5),
    ]
    advantages = oapl.advantage(episodes, beta=0.5)
    mean = (math.exp(2.0) + 2.0) / 3
    value = 0.5 * math.log(mean)
    expected = [1.0 - value, -value, 0.0, -value]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)


def test_oapl_does_not_overflow_with_a_small_beta() -> None:
    episodes = [
        episode("a", 1000.0),
        episode("a", 0.0),
    ]
    best, worst = oapl.advantage(episodes, beta=1e-3)
    # The value is 1000 - beta * ln 2: the better half of the group counts alone.
    assert best == pytest.approx(1e-3 * math.log(2.0))
    assert worst == pytest.approx(best - 1000.0)


def normalised(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    deviation = statistics.pstdev(values)
    scale = deviation + 1e-6
    return [(value - mean) / scale for value in values]


def test_gdpo_normalises_each_reward_in_its_group_and_the_sum_in_the_batch() -> None:
    rewards_of = {"a": (1.0, 0.0, 1.0), "b": (1.0, 1.0)}
    metrics_of = {"a": (300.0, 10.0, 20.0), "b": (5.0, 1.0)}
    episodes: list[ScoredEpisode] = []
    sums: list[float] = []
    for name, rewards in rewards_of.items():
        metrics = metrics_of[name]
        pairs = zip(rewards, metrics, strict=True)
        episodes.extend(episode(name, reward, short=metric) for reward, metric in pairs)
        pairs = zip(
            normalised(rewards),
            normalised(metrics),
            strict=True,
        )
        sums.extend(2.0 * reward + 0.5 * metric for reward, metric in pairs)
    advantages = gdpo.advantage(
        episodes,
        metrics=("short",),
        weights=(2.0, 0.5),
    )
    expected = normalised(sums)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9)
    # A group of equal rewards learns from the other reward alone.
    assert advantages[3] > 0.0
    assert advantages[4] < 0.0


def test_gdpo_of_one_reward_is_that_of_the_group_on_the_scale_of_the_batch() -> None:
    episodes = [
        episode("a", 3.0),
        episode("a", 1.0),
        episode("b", 2.0),
        episode("b", 2.0),
    ]
    advantages = gdpo.advantage(episodes)
    expected = normalised([1.0, -1.0, 0.0, 0.0])
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_gdpo_takes_no_rounding_error_for_a_difference() -> None:
    equal = [episode("a", 0.1)] * 3
    assert gdpo.advantage(equal).tolist() == [0.0] * 3
    assert not len(gdpo.advantage([]))


def test_gdpo_refuses_another_number_of_weights_and_a_metric_that_is_not_there() -> (
    None
):
    episodes = [
        episode("a", 3.0),
        episode("a", 1.0),
    ]
    with pytest.raises(ValueError, match="weights must be 1 numbers, got 2"):
        gdpo.advantage(episodes, weights=(1.0, 1.0))
    with pytest.raises(KeyError, match="short"):
        gdpo.advantage(episodes, metrics=("short",))
