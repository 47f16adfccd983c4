"""The clipped objective on packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from slipstream.learner.trainer.packing import MicroBatch
from torch import Tensor

MAX_LOG_RATIO = 20.0


class Sum(IntEnum):
    """What `TokenLoss.sums` holds: sums over the trained tokens."""

    LOSS = 0
    TOKENS = 1
    ENTROPY = 2
    CLIPPED = 3
    WEIGHT = 4
    CAPPED = 5
    KL = 6
    GAP = 7
    GAP_TOKENS = 8


@dataclass(frozen=True)
class Objective:
    """The numbers of the objective; `AlgorithmSection` says what they mean."""

    clip_low: float
    clip_high: float
    importance_cap: float


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro batch and what it is made of."""

    # Sum over the trained tokens; the caller divides by their number in the whole mini-batch.
    loss: Tensor
    num_tokens: Tensor
    # float64, indexed by `Sum`.
    sums: Tensor
    # Largest gap of the log-probabilities among tokens of lag 0; 0 without any.
    max_gap: Tensor


def clipped_loss(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    objective: Objective,
) -> TokenLoss:
    """Sum over `loss_mask` of -weight * min(ratio * advantage, clip(ratio) * advantage).

    `old_logprobs` are those of the policy before the first mini-batch; None: the policy is still
    that one, and the ratio is 1 in value. The weight min(exp(old - behavior), cap) corrects for
    what sampled the tokens, without a gradient. With a cap of 0 there is no weight, and the ratio
    is taken against the behavior log-probabilities instead. Log ratios are limited to 20 before
    exp. Source: PPO eq. 7 (arXiv:1707.06347) with GRPO's advantages (arXiv:2402.03300).
    """
    mask = micro_batch.loss_mask
    behavior, advantages = micro_batch.behavior_logprobs, micro_batch.advantages
    old = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    anchor, weight = behavior, torch.ones_like(behavior)
    if objective.importance_cap > 0:
        anchor, weight = old, _ratio(old - behavior)
    capped = weight > objective.importance_cap if objective.importance_cap > 0 else weight < 0
    weight = torch.where(capped, objective.importance_cap, weight)
    ratio = _ratio(policy_logprobs - anchor)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    losses = torch.where(mask, -weight * surrogate, 0.0)
    loss = losses.sum()
    with torch.no_grad():
        log_ratio = (policy_logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        gap = (old - behavior).abs()
        is_fresh = mask & (micro_batch.lags == 0)
        columns = {
            Sum.LOSS: losses,
            Sum.TOKENS: mask,
            Sum.ENTROPY: entropy * mask,
            Sum.CLIPPED: (clipped * advantages < ratio * advantages) & mask,
            Sum.WEIGHT: weight * mask,
            Sum.CAPPED: capped & mask,
            Sum.KL: (log_ratio.exp() - 1 - log_ratio) * mask,
            Sum.GAP: gap * is_fresh,
            Sum.GAP_TOKENS: is_fresh,
        }
        sums = torch.stack([columns[name].sum(dtype=torch.float64) for name in Sum])
        max_gap = (gap * is_fresh).max()
    return TokenLoss(loss, mask.sum(), sums, max_gap)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
