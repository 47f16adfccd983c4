"""Algorithms of deploy/algorithms that see the whole batch, beside plain loops in float64."""

import math
import random

import pytest
import torch
from slipstream.learner.algorithms.inputs import (
    BatchSums,
    LossInputs,
    RecordedSums,
    SequenceSums,
)
from torch import Tensor

from deploy.algorithms import covariance, m2po, top_entropy

NUM_TOKENS = 60


def drawn(seed: int) -> LossInputs:
    """Tokens of random fields, of which about a tenth is not trained."""
    chance = random.Random(seed)

    def field(low: float, high: float) -> Tensor:
        numbers = [chance.uniform(low, high) for _ in range(NUM_TOKENS)]
        return torch.tensor(
            numbers,
            dtype=torch.float64,
        )

    mask = field(0, 1) < 0.9
    logprobs = field(-4, 0)
    zeros = torch.zeros(
        NUM_TOKENS,
        dtype=torch.int64,
    )
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        proximal_logprobs=logprobs + field(-0.5, 0.5),
        behavior_logprobs=logprobs + field(-0.5, 0.5),
        advantages=field(-2, 2),
        mask=mask,
        is_given=torch.zeros_like(mask),
        lags=zeros,
        versions=zeros,
        reference_logprobs=None,
        entropy=field(0, 3),
        sequences=SequenceSums(zeros, mask, 1),
        batch=BatchSums(mask),
    )


class Plain:
    """The trained tokens as lists of numbers, by their places."""

    def __init__(self, tokens: LossInputs) -> None:
        self.places = []
        for place, is_trained in enumerate(tokens.mask.tolist()):
            if is_trained:
                self.places.append(place)
        self.logprobs = tokens.logprobs.tolist()
        self.proximal = tokens.proximal_logprobs.tolist()
        self.behavior = tokens.behavior_logprobs.tolist()
        self.advantages = tokens.advantages.tolist()
        self.entropy = tokens.entropy.tolist()

    def mean(self, values: list[float]) -> float:
        total = 0.0
        for place in self.places:
            total += values[place]
        return total / len(self.places)

    def log_ratio(self, place: int) -> float:
        return self.logprobs[place] - self.proximal[place]

    def loss(self, place: int) -> float:
        ratio = math.exp(self.log_ratio(place))
        return -ratio * self.advantages[place]

    def covariances(self) -> dict[int, float]:
        mean_logprob = self.mean(self.logprobs)
        mean_advantage = self.mean(self.advantages)
        values = {}
        for place in self.places:
            above_mean = self.logprobs[place] - mean_logprob
            advantage = self.advantages[place] - mean_advantage
            values[place] = above_mean * advantage
        return values


def highest(values: dict[int, float], number: int) -> list[int]:
    """The places of the `number` highest values."""
    order = sorted(
        values,
        key=values.__getitem__,
        reverse=True,
    )
    return order[:number]


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_of_highest_entropy_learn(seed: int) -> None:
    tokens = drawn(seed)
    plain = Plain(tokens)
    terms = top_entropy.loss(
        tokens,
        share=0.2,
        clip_low=0.2,
        clip_high=0.28,
    )
    losses = terms.losses.tolist()
    entropies = {place: plain.entropy[place] for place in plain.places}
    number = math.ceil(0.2 * len(entropies))
    learning = highest(entropies, number)
    for place in plain.places:
        advantage = plain.advantages[place]
        ratio = math.exp(plain.log_ratio(place))
        clipped = min(max(ratio, 0.8), 1.28)
        expected = -min(ratio * advantage, clipped * advantage)
        if place not in learning:
            expected = 0.0
        assert losses[place] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_clip_cov_takes_the_gradient_of_tokens_in_a_band_of_covariance(
    seed: int,
) -> None:
    tokens = drawn(seed)
    plain = Plain(tokens)
    terms = covariance.clip_cov(
        tokens,
        share=0.1,
        low=0.3,
        high=1.5,
    )
    total = terms.losses[tokens.mask].sum()
    (gradient,) = torch.autograd.grad(total, tokens.logprobs)
    losses = terms.losses.tolist()
    covariances = plain.covariances()
    band = {place: value for place, value in covariances.items() if 0.3 <= value <= 1.5}
    number = math.floor(0.1 * len(plain.places))
    clipped = highest(band, number)
    assert clipped
    for place in plain.places:
        expected = plain.loss(place)
        slope = 0.0 if place in clipped else expected
        assert losses[place] == pytest.approx(expected, abs=1e-12)
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_kl_cov_holds_tokens_of_the_largest_covariance_back(seed: int) -> None:
    tokens = drawn(seed)
    plain = Plain(tokens)
    terms = covariance.kl_cov(
        tokens,
        share=0.1,
        beta=0.7,
    )
    losses = terms.losses.tolist()
    number = math.floor(0.1 * len(plain.places))
    penalised = highest(plain.covariances(), number)
    for place in plain.places:
        expected = plain.loss(place)
        if place in penalised:
            expected += 0.7 * abs(plain.log_ratio(place))
        assert losses[place] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("bound", [0.0001, 0.02, 0.04, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_m2po_leaves_out_the_farthest_tokens_until_the_moment_is_small(
    seed: int,
    bound: float,
) -> None:
    tokens = drawn(seed)
    plain = Plain(tokens)
    weights = m2po.weight(tokens, bound=bound).weights.tolist()
    moments = {}
    log_ratios = {}
    for place in plain.places:
        log_ratio = plain.logprobs[place] - plain.behavior[place]
        log_ratios[place] = log_ratio
        moments[place] = log_ratio**2
    while moments and sum(moments.values()) / len(moments) > bound:
        (farthest,) = highest(moments, 1)
        del moments[farthest]
    for place in plain.places:
        expected = 0.0
        if place in moments:
            expected = math.exp(log_ratios[place])
        assert weights[place] == pytest.approx(expected, abs=1e-12)


def test_numbers_of_a_batch_are_those_of_its_trained_tokens() -> None:
    values = torch.tensor([3.0, 1.0, 9.0, 2.0, 1.0])
    mask = torch.tensor([True, True, False, True, True])
    batch = BatchSums(mask)
    assert batch.sum(values).item() == 7
    assert batch.mean(values).item() == 7 / 4
    assert batch.sorted(values).tolist() == [1, 1, 2, 3]
    # How many of the trained tokens are smaller, for a token that is not trained too.
    assert batch.ranks(values).tolist() == [3, 0, 4, 2, 0]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, 1), (0.5, 1), (0.51, 2), (0.75, 2), (1, 3)],
)
def test_a_quantile_is_a_value_of_the_batch(share: float, expected: float) -> None:
    values = torch.tensor([3.0, 1.0, 2.0, 1.0])
    mask = torch.ones(4, dtype=torch.bool)
    quantile = BatchSums(mask).quantile(values, share)
    assert quantile.item() == expected


def test_numbers_of_a_batch_without_a_trained_token_are_0() -> None:
    values = torch.ones(3)
    mask = torch.zeros(3, dtype=torch.bool)
    batch = BatchSums(mask)
    assert batch.sum(values).item() == 0
    assert batch.mean(values).item() == 0
    assert batch.quantile(values, 0.5).item() == 0


def test_a_micro_batch_gets_the_recorded_numbers_and_no_further_ones() -> None:
    values = torch.tensor([1.0, 2.0])
    mask = torch.ones(2, dtype=torch.bool)
    batch = BatchSums(mask)
    batch.sum(values)
    part = RecordedSums(mask[:1], batch.asked)
    assert part.sum(values[:1]).item() == 3
    with pytest.raises(ValueError, match="number 2 of tokens.batch is not known here"):
        part.sum(values[:1])
