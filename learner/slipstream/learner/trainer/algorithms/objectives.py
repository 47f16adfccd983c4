"""The losses of single tokens, before aggregation: pure functions.

`policy_logprobs` [tokens] carry the gradient. `anchor_logprobs` [tokens] belong to the policy in
the denominator of the ratio, and carry no gradient. Log ratios are limited to 20 before exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.trainer.algorithms.kl import safe_ratio
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from torch import Tensor


class SequenceSums:
    """Sums and means over the trained tokens of each sequence; collective over `group`.

    `group` has the context parallel ranks that share the sequences; None if sequences are not
    shared. Sums carry no gradient: the loss uses ratios, weights, masks and lengths of whole
    sequences as constants.
    """

    def __init__(self, micro_batch: MicroBatch, group: dist.ProcessGroup | None) -> None:
        self._ids = micro_batch.sequence_ids
        self._mask = micro_batch.loss_mask
        self._number = len(micro_batch.indices) + 1
        self._group = group if group is not None and group.size() > 1 else None

    def sums(self, values: Tensor) -> Tensor:
        """Returns for each token the sum over its sequence, [tokens]; 0 without a trained token."""
        sums = self._sums(values)
        return sums[self._ids].to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Returns for each token its sequence's mean, [tokens]; 0 without a trained token."""
        means = self._sums(values) / self._sums(self._mask).clamp(min=1)
        return means[self._ids].to(values.dtype)

    @torch.no_grad()
    def _sums(self, values: Tensor) -> Tensor:
        # float64 keeps the order of additions over ranks and tokens from changing a float32 result.
        trained = torch.where(self._mask, values, 0).to(torch.float64)
        sums = torch.zeros(self._number, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self._ids, trained)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums


@dataclass(frozen=True)
class TokenLosses:
    """Losses and clip marks, all [tokens].

    A clipped token has no gradient; with CISPO it has one, and only its weight was cut.
    """

    losses: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    is_dual_clipped: Tensor


def token_losses(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    algorithm: AlgorithmSection,
    sequences: SequenceSums,
) -> TokenLosses:
    """Returns the losses of the objective `algorithm.loss`."""
    clip = (algorithm.clip_low, algorithm.clip_high)
    match algorithm.loss:
        case "ppo":
            ratio = safe_ratio(policy_logprobs - anchor_logprobs)
            return clipped_losses(ratio, advantages, *clip, dual_clip=algorithm.dual_clip)
        case "gspo":
            ratio = sequence_ratio(policy_logprobs, anchor_logprobs, sequences)
            return clipped_losses(ratio, advantages, *clip)
        case "cispo":
            return cispo_losses(policy_logprobs, anchor_logprobs, advantages, *clip)
        case "sapo":
            ratio = safe_ratio(policy_logprobs - anchor_logprobs)
            taus = algorithm.sapo_tau
            return _unclipped(sapo_losses(ratio, advantages, *taus))
        case "reinforce":
            return _unclipped(reinforce_losses(policy_logprobs, advantages))


def clipped_losses(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Returns -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    For A < 0 the loss is at most -dual_clip * A. Source: PPO eq. 7 (arXiv:1707.06347); a wider
    upper range is DAPO's clip-higher (arXiv:2503.14476); the bound for A < 0 is dual-clip PPO's
    (arXiv:1912.09729).
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = clipped * advantages < ratio * advantages
    is_dual_clipped = torch.zeros_like(is_clipped)
    if dual_clip is not None:
        bound = dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(is_dual_clipped, bound, surrogate)
    return TokenLosses(
        -surrogate, is_clipped & (ratio < 1), is_clipped & (ratio > 1), is_dual_clipped
    )


def sequence_ratio(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, sequences: SequenceSums
) -> Tensor:
    """Returns the geometric mean of a sequence's token ratios, at each of its tokens.

    The value is the sequence's, the gradient is the token's own: GSPO-token (arXiv:2507.18071, eq.
    13). If all tokens of a sequence have the same advantage, the mean over its tokens has the value
    and gradient of GSPO's sequence loss (eq. 5), and ranks that share the sequence need not
    exchange gradients.
    """
    log_ratio = sequences.means(policy_logprobs - anchor_logprobs)
    return safe_ratio(log_ratio + policy_logprobs - policy_logprobs.detach())


def cispo_losses(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """Returns -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log policy.

    The ratio carries no gradient. No token loses its gradient: only its weight is cut. `clip_low` 1
    means no lower bound, the paper's setting. Source: CISPO, MiniMax-M1 (arXiv:2506.13585, eq. 4
    and 5).
    """
    ratio = safe_ratio(policy_logprobs - anchor_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * advantages * policy_logprobs
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(losses, ratio < 1 - clip_low, ratio > 1 + clip_high, nowhere)


def sapo_losses(
    ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """Returns -gate(ratio) * A with gate(x) = sigmoid(tau * (x - 1)) * 4 / tau.

    The slope of the gate is 1 at ratio 1, and fades smoothly away from it. tau is `tau_positive`
    for A > 0, else `tau_negative`. Source: SAPO (arXiv:2511.20347).
    """
    taus = torch.where(advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(taus * (ratio - 1)) * (4 / taus) * advantages


def reinforce_losses(policy_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns -A * log policy.

    Source: R. J. Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning" (1992); for language models arXiv:2402.14740.
    """
    return -advantages * policy_logprobs


def _unclipped(losses: Tensor) -> TokenLosses:
    nowhere = torch.zeros_like(losses, dtype=torch.bool)
    return TokenLosses(losses, nowhere, nowhere, nowhere)
