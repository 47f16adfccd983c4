"""GMPO, a loss: the geometric mean of a sequence's clipped ratios (arXiv:2507.20673)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from slipstream.learner.algorithms.inputs import LossInputs, TokenTerms

Width = Annotated[float, Field(gt=0)]


def loss(tokens: LossInputs, *, clip_low: Width = 0.4, clip_high: Width = 0.4) -> TokenTerms:
    """Returns -A * exp(the sequence's mean of the clipped log ratios) at each token.

    A log ratio is at most `clip_high` where A > 0, and at least -`clip_low` elsewhere. With
    `aggregation = "sequence_mean"` value and gradient are those of the paper's loss: each token has
    the value of its sequence, and the gradient of its own ratio.
    """
    log_ratios = tokens.logprobs - tokens.proximal_logprobs
    clipped = torch.where(
        tokens.advantages > 0, log_ratios.clamp(max=clip_high), log_ratios.clamp(min=-clip_low)
    )
    means = tokens.sequences.means(clipped) + clipped - clipped.detach()
    losses = -tokens.advantages * means.clamp(-20, 20).exp()
    return TokenTerms(losses, {"gmpo_clipped": (clipped != log_ratios).float()})
