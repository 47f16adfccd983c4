"""The loss of a packed micro batch from objective, correction, divergence and entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from slipstream.core.settings.algorithm_section import (
    TOP_K_ESTIMATORS,
    AlgorithmSection,
    KlEstimator,
)
from slipstream.learner.trainer.algorithms.correction import Correction, correct
from slipstream.learner.trainer.algorithms.kl import kl_estimate, top_k_divergence
from slipstream.learner.trainer.algorithms.objectives import SequenceSums, TokenLosses, token_losses
from slipstream.learner.trainer.algorithms.statistics import TokenStatistics, token_statistics
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from torch import Tensor

Terms = TypeVar("Terms", TokenLosses, Correction)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro batch and its statistics."""

    # Sum over the trained tokens; the caller divides by their number in the whole mini-batch.
    loss: Tensor
    num_tokens: Tensor
    statistics: TokenStatistics
    # The terms of the sum, detached [tokens].
    token_losses: Tensor


@dataclass(frozen=True)
class _Terms:
    """The terms of the loss of each token by one algorithm, all [tokens]."""

    losses: Tensor
    parts: TokenLosses
    correction: Correction


def policy_loss(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    algorithm: AlgorithmSection,
    *,
    others: Sequence[AlgorithmSection] = (),
    group: dist.ProcessGroup | None,
) -> TokenLoss:
    """Returns the sum over `loss_mask` of each token's loss times its `loss_weights`.

    The loss of a token is weight * (objective + kl.coefficient * divergence) - entropy_coefficient
    * entropy. The weight corrects for the policy that sampled the token and is 0 for masked tokens.
    It also applies to the divergence, which is a mean over tokens of the policy.

    `policy_logprobs` belong to `micro_batch.all_targets`; `old_logprobs` to its targets and the
    policy before the first mini-batch, the proximal policy, and are None if no mini-batch has
    changed the policy yet. REINFORCE has no proximal policy: its weight leads from the behavior
    policy to the present one. `entropy` carries a gradient if its coefficient is not 0.
    `others[n - 1]` is the algorithm of a token whose `algorithm_ids` is n > 0. Collective over
    `group`, the context parallel ranks, unless it is None.
    """
    mask = micro_batch.loss_mask
    top: Tensor | None = None
    if policy_logprobs.dim() > 1:
        policy_logprobs, top = policy_logprobs[:, 0], policy_logprobs[:, 1:]
    logprobs = (policy_logprobs, policy_logprobs.detach() if old_logprobs is None else old_logprobs)
    sequences = SequenceSums(micro_batch, group)
    ids = micro_batch.algorithm_ids
    terms = _terms((*logprobs, top), entropy, micro_batch, algorithm, sequences)
    for place, other in enumerate(others if ids is not None else (), start=1):
        found = _terms((*logprobs, top), entropy, micro_batch, other, sequences)
        assert ids is not None
        terms = _chosen(ids == place, found, terms)
    losses = torch.where(mask, micro_batch.loss_weights * terms.losses, 0.0)
    statistics = token_statistics(
        losses, terms.parts, terms.correction, logprobs, entropy, micro_batch
    )
    return TokenLoss(losses.sum(), mask.sum(), statistics, losses.detach())


def _terms(
    logprobs: tuple[Tensor, Tensor, Tensor | None],
    entropy: Tensor,
    micro_batch: MicroBatch,
    algorithm: AlgorithmSection,
    sequences: SequenceSums,
) -> _Terms:
    """Computes all per-token terms of the loss by `algorithm`.

    `logprobs` are the policy's: current, proximal, and current at the reference's top k.
    """
    policy, proximal, top = logprobs
    corrected = policy.detach() if algorithm.loss == "reinforce" else proximal
    behavior = micro_batch.behavior_logprobs
    # A token that no policy sampled needs no correction: its ratio is 1.
    behavior = torch.where(behavior.isnan(), corrected, behavior)
    correction = correct(corrected, behavior, algorithm.correction, sequences)
    anchor = behavior if algorithm.ratio == "behavior" else proximal
    parts = token_losses(policy, anchor, micro_batch.advantages, algorithm, sequences)
    losses = correction.weights * parts.losses
    kl = algorithm.kl
    if kl.coefficient and kl.placement == "loss":
        divergence = _divergence(policy, top, micro_batch, kl.estimator)
        losses = losses + kl.coefficient * correction.weights * divergence
    if algorithm.entropy_coefficient:
        losses = losses - algorithm.entropy_coefficient * entropy
    return _Terms(losses, parts, correction)


def _divergence(
    policy: Tensor, top: Tensor | None, micro_batch: MicroBatch, estimator: KlEstimator
) -> Tensor:
    if estimator in TOP_K_ESTIMATORS:
        likely = micro_batch.top_logprobs
        assert top is not None, "the divergence needs the reference's most likely tokens"
        assert likely is not None
        return top_k_divergence(top, likely, estimator)
    reference = micro_batch.reference_logprobs
    assert reference is not None, "the divergence needs the reference model's log-probabilities"
    return kl_estimate(policy, reference, estimator)


def _chosen(is_other: Tensor, other: _Terms, terms: _Terms) -> _Terms:
    """Selects `other` where `is_other`, else `terms`."""

    def chosen(one: Terms, two: Terms) -> Terms:
        values: dict[str, Any] = {
            name: torch.where(is_other, value, getattr(two, name))
            for name, value in vars(one).items()
        }
        return type(one)(**values)

    return _Terms(
        torch.where(is_other, other.losses, terms.losses),
        chosen(other.parts, terms.parts),
        chosen(other.correction, terms.correction),
    )
