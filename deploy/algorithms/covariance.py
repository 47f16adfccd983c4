"""Clip-Cov and KL-Cov, losses that hold back tokens of high covariance (arXiv:2505.22617)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms
from torch import Tensor

Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


def clip_cov(
    tokens: LossInputs,
    *,
    share: Share = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> TokenTerms:
    """Returns -r * A without a gradient at `share` of all trained tokens (eq. 13).

    They are taken among those with a covariance from `low` to `high`. The paper draws them at
    random; a pure function cannot, and takes those of the largest covariance. Tokens that are equal
    to the last of them are taken too.
    """
    covariances = _covariances(tokens)
    is_between = (covariances >= low) & (covariances <= high)
    # All others come behind.
    places = torch.where(is_between, -covariances, torch.inf)
    ranks = tokens.batch.ranks(places)
    is_clipped = is_between & (ranks < _number_of(tokens, share))
    losses = _losses(tokens)
    losses = torch.where(is_clipped, losses.detach(), losses)
    reports = {"clip_cov": is_clipped.float()}
    return TokenTerms(losses, reports)


def kl_cov(
    tokens: LossInputs,
    *,
    share: Share = 2e-3,
    beta: NotNegative = 1.0,
) -> TokenTerms:
    """Returns -r * A, plus `beta` * |log r| at `share` of all trained tokens (eq. 14).

    They are those of the largest covariance; tokens that are equal to the last of them are taken
    too. Where the policy is the proximal one, the penalty has no slope: use mini-batches.
    """
    ranks = tokens.batch.ranks(-_covariances(tokens))
    is_penalised = ranks < _number_of(tokens, share)
    divergences = _log_ratios(tokens).abs()
    penalties = beta * divergences * is_penalised
    reports = {"kl_cov": is_penalised.float()}
    return TokenTerms(_losses(tokens) + penalties, reports)


def _number_of(tokens: LossInputs, share: float) -> Tensor:
    """Returns how many of all trained tokens are `share` of them, rounded down."""
    ones = torch.ones_like(tokens.advantages)
    number = share * tokens.batch.sum(ones)
    return (number + 1e-9).floor()


def _log_ratios(tokens: LossInputs) -> Tensor:
    return tokens.logprobs - tokens.proximal_logprobs


def _losses(tokens: LossInputs) -> Tensor:
    ratios = _log_ratios(tokens).clamp(-20, 20).exp()
    return -ratios * tokens.advantages


def _covariances(tokens: LossInputs) -> Tensor:
    """Returns (log p - mean) * (A - mean) of each token, by means over the batch (eq. 10)."""
    batch = tokens.batch
    logprobs = tokens.logprobs.detach()
    advantages = tokens.advantages
    above_mean = logprobs - batch.mean(logprobs)
    return above_mean * (advantages - batch.mean(advantages))
