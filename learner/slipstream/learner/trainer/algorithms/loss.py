"""The loss of a packed micro batch from objective, correction, divergence and entropy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from slipstream.learner.trainer.algorithms.correction import correct
from slipstream.learner.trainer.algorithms.kl import kl_estimate
from slipstream.learner.trainer.algorithms.objectives import token_losses
from slipstream.learner.trainer.algorithms.sequence_sums import SequenceSums
from slipstream.learner.trainer.algorithms.statistics import TokenStatistics, token_statistics
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.protocol.settings.algorithm_section import AlgorithmSection
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one micro batch and its statistics."""

    # Sum over the trained tokens; the caller divides by their number in the whole mini-batch.
    loss: Tensor
    num_tokens: Tensor
    statistics: TokenStatistics
    # What the sum is made of, detached [tokens].
    token_losses: Tensor


def policy_loss(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    algorithm: AlgorithmSection,
    *,
    group: dist.ProcessGroup | None,
) -> TokenLoss:
    """Returns the sum over `loss_mask` of each token's loss times its `loss_weights`.

    The loss of a token is weight * (objective + kl.coefficient * divergence) - entropy_coefficient
    * entropy. The weight corrects for the policy that sampled the token and is 0 for masked tokens.
    It also applies to the divergence, which is a mean over tokens of the policy.

    `old_logprobs` belong to the policy before the first mini-batch, the proximal policy; None: no
    mini-batch has changed the policy yet. REINFORCE has no proximal policy: its weight leads from
    the behavior policy to the present one. `entropy` carries a gradient if its coefficient is not
    0. Collective over `group`, the context parallel ranks, unless it is None.
    """
    mask = micro_batch.loss_mask
    proximal = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    corrected = policy_logprobs.detach() if algorithm.loss == "reinforce" else proximal
    behavior = micro_batch.behavior_logprobs
    # A token that no policy sampled needs no correction: its ratio is 1.
    behavior = torch.where(behavior.isnan(), corrected, behavior)
    micro_batch = dataclasses.replace(micro_batch, behavior_logprobs=behavior)
    sequences = SequenceSums(micro_batch, group)
    correction = correct(corrected, behavior, algorithm.correction, sequences)
    anchor = behavior if algorithm.ratio == "behavior" else proximal
    parts = token_losses(policy_logprobs, anchor, micro_batch.advantages, algorithm, sequences)
    losses = correction.weights * parts.losses
    kl = algorithm.kl
    if kl.coefficient and kl.placement == "loss":
        reference = micro_batch.reference_logprobs
        assert reference is not None, "the divergence needs the reference model's log-probabilities"
        divergence = kl_estimate(policy_logprobs, reference, kl.estimator)
        losses = losses + kl.coefficient * correction.weights * divergence
    if algorithm.entropy_coefficient:
        losses = losses - algorithm.entropy_coefficient * entropy
    losses = torch.where(mask, micro_batch.loss_weights * losses, 0.0)
    statistics = token_statistics(
        losses, parts, correction, (policy_logprobs, proximal), entropy, micro_batch
    )
    return TokenLoss(losses.sum(), mask.sum(), statistics, losses.detach())
