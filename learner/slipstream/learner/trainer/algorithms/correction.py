"""Corrections for tokens that another policy sampled: weights and masks, without gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream.core.settings.algorithm_section import Band, CorrectionSection
from slipstream.learner.trainer.algorithms.kl import safe_ratio
from slipstream.learner.trainer.algorithms.objectives import SequenceSums
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """The correction of each token, all [tokens]; values at untrained tokens have no meaning."""

    # Factor of the loss: 0 for masked tokens.
    weights: Tensor
    # Ratios from which `weights` are made, before the cap.
    ratios: Tensor
    is_capped: Tensor
    is_token_masked: Tensor
    is_sequence_masked: Tensor


@torch.no_grad()
def correct(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    settings: CorrectionSection,
    sequences: SequenceSums,
) -> Correction:
    """Returns weights for tokens that the behavior policy sampled.

    `policy_logprobs` belong to the policy from which the loss measures its own ratio (the proximal
    policy). Weight and ratio together lead from the behavior policy to the trained policy:
    decoupled PPO (arXiv:2110.00641), as in AReaL (arXiv:2505.24298).
    - `weight = "token"`: min(ratio, cap), truncated importance sampling (IMPALA, arXiv:1802.01561);
    - `weight = "sequence"`: min(product of the sequence's ratios, cap), unbiased except for the
    cap;
    - `token_band`: 0 outside the band, IcePop (arXiv:2510.18855);
    - `sequence_band`: 0 for a sequence whose geometric mean of the ratios is outside the band.
    Log ratios, and their sum over a sequence, are limited to 20 before exp.
    """
    log_ratios = policy_logprobs - behavior_logprobs
    token_ratios = safe_ratio(log_ratios)
    nowhere = torch.zeros_like(token_ratios, dtype=torch.bool)
    match settings.weight:
        case "none":
            ratios = torch.ones_like(token_ratios)
        case "token":
            ratios = token_ratios
        case "sequence":
            ratios = safe_ratio(sequences.sums(log_ratios))
    is_capped = nowhere if settings.weight == "none" else ratios > settings.cap
    weights = torch.where(is_capped, settings.cap, ratios)
    is_token_masked = is_sequence_masked = nowhere
    if settings.token_band is not None:
        is_token_masked = _is_outside(token_ratios, settings.token_band)
    if settings.sequence_band is not None:
        means = safe_ratio(sequences.means(log_ratios))
        is_sequence_masked = _is_outside(means, settings.sequence_band)
    weights = torch.where(is_token_masked | is_sequence_masked, 0.0, weights)
    return Correction(weights, ratios, is_capped, is_token_masked, is_sequence_masked)


def _is_outside(ratios: Tensor, band: Band) -> Tensor:
    return (ratios < band[0]) | (ratios > band[1])
