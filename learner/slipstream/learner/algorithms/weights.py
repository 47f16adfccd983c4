"""The built-in importance weights of tokens: factors and masks without a gradient.

Here the ratio is a token's probability by the proximal policy (before the step) divided by its
probability by the behavior policy. The loss's ratio then corrects from the proximal to the trained
policy: decoupled PPO (arXiv:2110.00641), as in AReaL (arXiv:2505.24298). A loss without a ratio
needs `to="present"`, which puts the trained policy in place of the proximal policy. Log ratios, and
their sums over sequences, are clamped to -20 .. 20 before exp. All three functions can mask tokens:
- `token_band` masks a token whose ratio is outside the band: IcePop (arXiv:2510.18855);
- `sequence_band` masks a sequence whose ratios have a geometric mean outside the band.
"""

from typing import Literal

import torch
from slipstream.core.settings.algorithm_functions import Band
from slipstream.learner.algorithms.inputs import LossInputs, TokenWeights
from slipstream.learner.algorithms.kl import safe_ratio
from torch import Tensor

Target = Literal["proximal", "present"]


def none(
    tokens: LossInputs,
    *,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns 1 for each token inside the bands, else 0."""
    log_ratios = _log_ratios(tokens, to)
    return _masked(tokens, log_ratios, torch.ones_like(log_ratios), {}, token_band, sequence_band)


def token(
    tokens: LossInputs,
    *,
    cap: float = 2.0,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns min(ratio, cap) for each token inside the bands, else 0.

    This is truncated importance sampling (IMPALA, arXiv:1802.01561).
    """
    log_ratios = _log_ratios(tokens, to)
    capped = _capped(safe_ratio(log_ratios), cap)
    return _masked(tokens, log_ratios, *capped, token_band, sequence_band)


def sequence(
    tokens: LossInputs,
    *,
    cap: float = 2.0,
    token_band: Band | None = None,
    sequence_band: Band | None = None,
    to: Target = "proximal",
) -> TokenWeights:
    """Returns min(product of the sequence's ratios, cap) for each token inside the bands, else 0.

    Without bands only the cap adds bias.
    """
    log_ratios = _log_ratios(tokens, to)
    capped = _capped(safe_ratio(tokens.sequences.sums(log_ratios)), cap)
    return _masked(tokens, log_ratios, *capped, token_band, sequence_band)


def _log_ratios(tokens: LossInputs, to: Target) -> Tensor:
    if to == "proximal":
        return tokens.proximal_logprobs - tokens.behavior_logprobs
    # Given tokens have the ratio 1: no policy sampled them, so there is nothing to correct.
    found = tokens.logprobs.detach() - tokens.behavior_logprobs
    return torch.where(tokens.is_given, 0.0, found)


def _capped(ratios: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    is_capped = ratios > cap
    reports = {"importance_ratio_max": ratios, "importance_capped_fraction": is_capped}
    return torch.where(is_capped, cap, ratios), reports


def _masked(
    tokens: LossInputs,
    log_ratios: Tensor,
    weights: Tensor,
    reports: dict[str, Tensor],
    token_band: Band | None,
    sequence_band: Band | None,
) -> TokenWeights:
    if token_band is not None:
        is_outside = _is_outside(safe_ratio(log_ratios), token_band)
        reports["masked_token_fraction"] = is_outside
        weights = torch.where(is_outside, 0.0, weights)
    if sequence_band is not None:
        means = safe_ratio(tokens.sequences.means(log_ratios))
        is_outside = _is_outside(means, sequence_band)
        reports["masked_sequence_fraction"] = is_outside
        weights = torch.where(is_outside, 0.0, weights)
    return TokenWeights(weights, reports)


def _is_outside(ratios: Tensor, band: Band) -> Tensor:
    return (ratios < band[0]) | (ratios > band[1])
