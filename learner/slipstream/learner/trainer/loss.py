"""Log-probabilities of vocabulary-parallel logits, and the clipped objective on packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
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


class _VocabParallelLogprobs(torch.autograd.Function):
    """In place only on its own copy: the logits may be needed by others."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperature
        peak = scaled.amax(dim=-1)
        _reduce(peak, dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        exps = scaled.exp()
        total = exps.sum(dim=-1)
        _reduce(total, dist.ReduceOp.SUM, group)
        width = logits.shape[-1]
        first = width * (group.rank() if group is not None else 0)
        is_here = (targets >= first) & (targets < first + width)
        places = torch.where(is_here, targets - first, 0)
        found = scaled.gather(-1, places[:, None]).squeeze(-1) * is_here
        _reduce(found, dist.ReduceOp.SUM, group)
        probs = exps.div_(total[:, None])
        expected = scaled.mul_(probs).sum(dim=-1)
        _reduce(expected, dist.ReduceOp.SUM, group)
        entropy = total.log() - expected
        ctx.save_for_backward(probs, places, is_here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return found - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        probs, places, is_here = ctx.saved_tensors
        scaled_grad = (grads[0] / ctx.temperature)[:, None]
        grad = -probs * scaled_grad
        grad.scatter_add_(-1, places[:, None], scaled_grad * is_here[:, None])
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and the entropies, both float32 [tokens], natural logarithm.

    `logits` [tokens, vocabulary / size of group] is this rank's part; they are divided by
    `temperature` in float32. The entropy carries no gradient. Collective over `group`; None when
    the vocabulary is whole.
    """
    whole = group if group is not None and group.size() > 1 else None
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, temperature, whole)  # type: ignore[no-untyped-call]
    return logprobs, entropy


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


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
