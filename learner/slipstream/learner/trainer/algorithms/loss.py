"""The loss of a packed micro batch from objective, weight, divergence and entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from slipstream.core.settings.algorithm_section import (
    TOP_K_ESTIMATORS,
    AlgorithmSection,
    KlEstimator,
)
from slipstream.learner.algorithms.functions import function_of
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from slipstream.learner.algorithms.kl import kl_estimate, top_k_divergence
from slipstream.learner.algorithms.token_functions import token_terms, token_weights
from slipstream.learner.trainer.algorithms.statistics import (
    Column,
    TokenStatistics,
    columns_of,
    token_statistics,
)
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro batch and its statistics."""

    # Sum over the trained tokens; the caller divides by their number in the whole mini-batch.
    loss: Tensor
    num_tokens: Tensor
    statistics: TokenStatistics
    # The terms of the sum, detached [tokens].
    token_losses: Tensor


def policy_loss(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    algorithms: Sequence[AlgorithmSection],
    reports: Sequence[str],
    *,
    step: int = 0,
    group: dist.ProcessGroup | None,
) -> TokenLoss:
    """Returns the sum over `loss_mask` of each token's loss times its `loss_weights`.

    The loss of a token is weight * (objective + kl.coefficient * divergence) - entropy_coefficient
    * entropy. The weight corrects for the policy that sampled the token and is 0 for masked tokens.
    It also applies to the divergence, which is a mean over tokens of the policy.

    `policy_logprobs` belong to `micro_batch.all_targets`; `old_logprobs` to its targets and the
    policy before the first mini-batch, the proximal policy, and are None if no mini-batch has
    changed the policy yet. `entropy` carries a gradient if its coefficient is not 0.
    `algorithms[n]` is the algorithm of a token whose `algorithm_ids` is n; `reports` are the names
    of what their functions report. Collective over `group`, the context parallel ranks, unless it
    is None. Raises RunFailed for a faulty function.
    """
    mask, ids = micro_batch.loss_mask, micro_batch.algorithm_ids
    top: Tensor | None = None
    if policy_logprobs.dim() > 1:
        policy_logprobs, top = policy_logprobs[:, 0], policy_logprobs[:, 1:]
    proximal = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    behavior = micro_batch.behavior_logprobs
    is_given = behavior.isnan()
    tokens = LossInputs(
        logprobs=policy_logprobs,
        proximal_logprobs=proximal,
        # A token that no policy sampled needs no correction: its ratio is 1.
        behavior_logprobs=torch.where(is_given, proximal, behavior),
        advantages=micro_batch.advantages,
        mask=mask,
        is_given=is_given,
        lags=micro_batch.lags,
        versions=step - micro_batch.lags,
        reference_logprobs=micro_batch.reference_logprobs,
        entropy=entropy.detach(),
        sequences=SequenceSums(micro_batch.sequence_ids, mask, len(micro_batch.indices) + 1, group),
    )
    used = algorithms if ids is not None else algorithms[:1]
    where = f"step {step + 1}"
    losses = weights = torch.zeros_like(proximal)
    columns: list[Column] = []
    for place, algorithm in enumerate(used):
        chosen = mask if ids is None else mask & (ids == place)
        own = dataclasses.replace(tokens, mask=chosen)
        loss, weight = function_of(algorithm, "loss"), function_of(algorithm, "weight")
        factors, terms = token_weights(weight, own, where), token_terms(loss, own, where)
        for function, one, mine in ((loss, terms, chosen), (weight, factors, chosen & ~is_given)):
            if unknown := one.reports.keys() - set(reports):
                what = f"it reports {min(unknown)}, but did not of three tokens"
                raise function.fault(what, where)
            columns += columns_of(function, one, mine, chosen)
        found = factors.weights * terms.losses
        kl = algorithm.kl
        if kl.coefficient and kl.placement == "loss":
            divergence = _divergence(policy_logprobs, top, micro_batch, kl.estimator)
            found = found + kl.coefficient * factors.weights * divergence
        if algorithm.entropy_coefficient:
            found = found - algorithm.entropy_coefficient * entropy
        losses = torch.where(chosen, found, losses) if place else found
        weights = torch.where(chosen, factors.weights, weights) if place else factors.weights
    losses = torch.where(mask, micro_batch.loss_weights * losses, 0.0)
    statistics = token_statistics(losses, weights, tokens, columns, reports)
    return TokenLoss(losses.sum(), mask.sum(), statistics, losses.detach())


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
