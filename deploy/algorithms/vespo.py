"""VESPO, a weight: a smooth kernel of the sequence's importance ratio (arXiv:2602.10693)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenWeights

Positive = Annotated[float, Field(gt=0)]


def weight(
    tokens: LossInputs,
    *,
    power_positive: Positive = 2.0,
    decay_positive: Positive = 3.0,
    power_negative: Positive = 3.0,
    decay_negative: Positive = 2.0,
) -> TokenWeights:
    """Returns W^power * exp(decay * (1 - W)), with W the product of the sequence's ratios.

    A ratio is that of policy to behavior policy. The kernel is 1 at W = 1, rises up to W = power /
    decay and falls to 0 on both sides, so that no ratio is clipped and none has a large weight.
    Tokens with A > 0 have one power and decay, all others another; the numbers are those of TRL.
    With `loss = "reinforce"` the gradient is that of the paper's objective.
    """
    log_ratios = tokens.logprobs.detach() - tokens.behavior_logprobs
    products = tokens.sequences.sums(log_ratios).clamp(-20, 20)
    is_positive = tokens.advantages > 0
    powers = torch.where(is_positive, power_positive, power_negative)
    decays = torch.where(is_positive, decay_positive, decay_negative)
    exponents = powers * products + decays * (1 - products.exp())
    return TokenWeights(exponents.exp(), {"vespo_ratio_max": products.exp()})
