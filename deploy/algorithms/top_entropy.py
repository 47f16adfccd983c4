"""Only the tokens of highest entropy learn, a loss (arXiv:2506.01939)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms

Share = Annotated[float, Field(gt=0, le=1)]
Width = Annotated[float, Field(gt=0)]


def loss(
    tokens: LossInputs, *, share: Share = 0.2, clip_low: Width = 0.2, clip_high: Width = 0.28
) -> TokenTerms:
    """Returns DAPO's clipped loss at the `share` of all trained tokens with the highest entropy.

    It is 0 at all others, which still count in the mean, as in the paper's eq. 5. Tokens with the
    entropy of the bound learn too.
    """
    bound = tokens.batch.quantile(-tokens.entropy, share).neg()
    is_high = tokens.entropy >= bound
    ratios = (tokens.logprobs - tokens.proximal_logprobs).clamp(-20, 20).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    advantages = tokens.advantages
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    return TokenTerms(losses * is_high, {"high_entropy": is_high.float()})
