"""M2PO, a weight: the second moment of the log ratios of a batch is bounded (arXiv:2510.01161)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenWeights


def weight(tokens: LossInputs, *, bound: Annotated[float, Field(gt=0)] = 0.04) -> TokenWeights:
    """Returns the ratio r of policy to behavior policy, and 0 at the tokens that moved farthest.

    The tokens of the largest (log r)^2 are left out until the mean of the others is at most
    `bound`, over all trained tokens of the mini-batch. With `loss = "reinforce"` the gradient is
    that of the paper's objective, mask * r * A.
    """
    log_ratios = tokens.logprobs.detach() - tokens.behavior_logprobs
    moments = log_ratios.square().double()
    ascending = tokens.batch.sorted(moments)
    # The means of the smallest moments, equal ones together, only rise.
    numbers = torch.searchsorted(ascending, ascending, right=True)
    means = ascending.cumsum(0)[numbers - 1] / numbers
    num_kept = int((means <= bound).sum())
    is_kept = torch.zeros_like(tokens.mask)
    if num_kept:
        is_kept = moments <= ascending[num_kept - 1]
    weights = log_ratios.clamp(-20, 20).exp() * is_kept
    return TokenWeights(weights, {"m2po_masked": (~is_kept).float()})
