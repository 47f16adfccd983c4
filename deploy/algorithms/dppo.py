"""DPPO, a weight: ratios within a bound of the total variation (arXiv:2602.04879)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenWeights


def weight(tokens: LossInputs, *, bound: Annotated[float, Field(gt=0)] = 0.15) -> TokenWeights:
    """Returns the ratio r of policy to behavior policy, and 0 where the policy has moved too far.

    Too far is |policy - behavior| > `bound` in the direction of the advantage: r > 1 with A > 0, or
    r < 1 with A < 0. These are the binary total variation and the mask of the paper. With `loss =
    "reinforce"` the gradient is that of its objective, mask * r * A.
    """
    policy = tokens.logprobs.detach()
    behavior = tokens.behavior_logprobs
    moved = policy.exp() - behavior.exp()
    too_far = torch.where(tokens.advantages > 0, moved, -moved) > bound
    ratios = (policy - behavior).clamp(-20, 20).exp()
    return TokenWeights(ratios.masked_fill(too_far, 0), {"dppo_masked": too_far.float()})
