"""Statistics of a step's losses: sums over tokens and ranks, and metrics from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from slipstream.learner.trainer.algorithms.correction import Correction
from slipstream.learner.trainer.algorithms.kl import kl_estimate
from slipstream.learner.trainer.algorithms.objectives import TokenLosses
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

# One bin for each lag 0 to 6, and one for all larger lags.
NUM_LAGS = 8


class LossSum(IntEnum):
    """Indices of `TokenStatistics.sums`, sums over the trained tokens.

    From `SAMPLED` on they leave out tokens that no policy sampled.
    """

    LOSS = 0
    TOKENS = 1
    ENTROPY = 2
    CLIPPED_LOW = 3
    CLIPPED_HIGH = 4
    DUAL_CLIPPED = 5
    REFERENCE_KL = 6
    SAMPLED = 7
    WEIGHT = 8
    WEIGHT_SQUARED = 9
    CAPPED = 10
    TOKEN_MASKED = 11
    SEQUENCE_MASKED = 12
    KL = 13


class Max(IntEnum):
    """Indices of `TokenStatistics.maxima`."""

    # Largest gap of the log-probabilities among tokens of lag 0.
    GAP = 0
    # Largest ratio before the cap.
    IMPORTANCE_RATIO = 1


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of one micro batch on one rank; all 0 without a trained token."""

    # float64, indexed by `LossSum`.
    sums: Tensor
    # float64 [2, NUM_LAGS]: for each lag the sum of absolute gaps of the log-probabilities, and
    # the number of tokens.
    gaps: Tensor
    # float32, indexed by `Max`.
    maxima: Tensor


@torch.no_grad()
def token_statistics(
    losses: Tensor,
    parts: TokenLosses,
    correction: Correction,
    logprobs: tuple[Tensor, Tensor],
    entropy: Tensor,
    micro_batch: MicroBatch,
) -> TokenStatistics:
    """Returns statistics of `losses` [tokens]; `logprobs` are the policy's now and before."""
    mask, behavior = micro_batch.loss_mask, micro_batch.behavior_logprobs
    is_sampled = mask & ~behavior.isnan()
    policy, proximal = logprobs
    reference = micro_batch.reference_logprobs
    columns = {
        LossSum.LOSS: losses,
        LossSum.TOKENS: mask,
        LossSum.ENTROPY: entropy,
        LossSum.CLIPPED_LOW: parts.is_clipped_low,
        LossSum.CLIPPED_HIGH: parts.is_clipped_high,
        LossSum.DUAL_CLIPPED: parts.is_dual_clipped,
        LossSum.SAMPLED: is_sampled,
        LossSum.WEIGHT: correction.weights,
        LossSum.WEIGHT_SQUARED: correction.weights.double().square(),
        LossSum.CAPPED: correction.is_capped,
        LossSum.TOKEN_MASKED: correction.is_token_masked,
        LossSum.SEQUENCE_MASKED: correction.is_sequence_masked,
        # KL(behavior || policy): the behavior policy sampled the tokens.
        LossSum.KL: kl_estimate(behavior, policy, "k3"),
        LossSum.REFERENCE_KL: torch.zeros_like(policy)
        if reference is None
        else kl_estimate(policy, reference, "k3"),
    }
    found = [
        torch.where(mask if name < LossSum.SAMPLED else is_sampled, columns[name], 0)
        for name in LossSum
    ]
    sums = torch.stack([values.sum(dtype=torch.float64) for values in found])
    gap = torch.where(is_sampled, (proximal - behavior).abs(), 0.0)
    gaps = torch.zeros(2, NUM_LAGS, dtype=torch.float64, device=mask.device)
    lags = micro_batch.lags.clamp(0, NUM_LAGS - 1).long()
    gaps.index_add_(1, lags, torch.stack([gap.double(), is_sampled.double()]))
    maxima = torch.stack(
        [
            torch.where(micro_batch.lags == 0, gap, 0.0).max(),
            torch.where(is_sampled, correction.ratios, 0.0).max(),
        ]
    )
    return TokenStatistics(sums, gaps, maxima.float())


class StepStatistics:
    """Sums over mini-batches and ranks, the same on every rank; `add` each, then `metrics`.

    A step with several passes over its batch adds every mini-batch `epochs` times.
    """

    def __init__(self, epochs: int = 1) -> None:
        self._epochs = epochs
        self._sums = torch.zeros(len(LossSum), dtype=torch.float64)
        self._gaps = torch.zeros(2, NUM_LAGS, dtype=torch.float64)
        self._maxima = torch.zeros(len(Max))

    def add(self, found: Sequence[TokenStatistics], ranks: Ranks) -> float:
        """Adds a mini-batch and returns the sum of its losses; collective."""
        mine = torch.zeros(len(LossSum) + 2 * NUM_LAGS, dtype=torch.float64)
        maxima = torch.zeros(len(Max))
        if ranks.counts:
            # All are copied at once, because each copy waits for the device.
            rows = torch.stack([torch.cat([o.sums, o.gaps.flatten(), o.maxima]) for o in found])
            for row in rows.cpu():
                mine += row[: len(mine)]
                maxima = torch.maximum(maxima, row[len(mine) :].float())
        total = ranks.sum(mine)
        sums, gaps = total[: len(LossSum)], total[len(LossSum) :].reshape(2, NUM_LAGS)
        self._sums += sums
        self._gaps += gaps
        self._maxima = torch.maximum(self._maxima, ranks.max(maxima))
        return float(sums[LossSum.LOSS])

    def join(self, others: StepStatistics) -> None:
        """Adds the sums of other mini-batches of the same step."""
        self._sums += others._sums
        self._gaps += others._gaps
        self._maxima = torch.maximum(self._maxima, others._maxima)

    def metrics(self) -> dict[str, float]:
        """Returns means over the tokens and passes of the step; see docs/metrics.md."""
        weight, squared = self._total(LossSum.WEIGHT), self._total(LossSum.WEIGHT_SQUARED)
        sampled = max(1.0, self._total(LossSum.SAMPLED))
        low, high = self._mean(LossSum.CLIPPED_LOW), self._mean(LossSum.CLIPPED_HIGH)
        return {
            "loss": self._mean(LossSum.LOSS),
            "entropy": self._mean(LossSum.ENTROPY),
            "clip_fraction": low + high,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "dual_clip_fraction": self._mean(LossSum.DUAL_CLIPPED),
            "importance_weight_mean": weight / sampled,
            "importance_ratio_max": float(self._maxima[Max.IMPORTANCE_RATIO]),
            "importance_capped_fraction": self._mean(LossSum.CAPPED),
            "effective_sample_size": weight**2 / (sampled * squared) if squared else 0.0,
            "masked_token_fraction": self._mean(LossSum.TOKEN_MASKED),
            "masked_sequence_fraction": self._mean(LossSum.SEQUENCE_MASKED),
            "kl": self._mean(LossSum.KL),
            "kl_reference": self._mean(LossSum.REFERENCE_KL),
            "trained_tokens": self._total(LossSum.TOKENS) / self._epochs,
        } | self._gap_metrics()

    def _gap_metrics(self) -> dict[str, float]:
        gaps, tokens = self._gaps.tolist()
        by_lag = {
            f"logprob_gap_lag_{lag}": gaps[lag] / tokens[lag]
            for lag in range(1, NUM_LAGS)
            if tokens[lag]
        }
        return {
            "logprob_gap_mean": gaps[0] / max(1.0, tokens[0]),
            "logprob_gap_max": float(self._maxima[Max.GAP]),
            "logprob_gap_tokens": tokens[0] / self._epochs,
        } | by_lag

    def _total(self, name: LossSum) -> float:
        return float(self._sums[name])

    def _mean(self, name: LossSum) -> float:
        tokens = LossSum.TOKENS if name < LossSum.SAMPLED else LossSum.SAMPLED
        return self._total(name) / max(1.0, self._total(tokens))
