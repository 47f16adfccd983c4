"""The inputs of weight and losses, and the numbers of a mini-batch for which these ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.functions import function_of
from slipstream.learner.algorithms.inputs import LossInputs, RecordedSums, SequenceSums
from slipstream.learner.algorithms.losses import token_terms, token_weights
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from torch import Tensor


@dataclass(frozen=True)
class BatchNumbers:
    """The numbers of a mini-batch for which weight and losses ask, in the order of their calls."""

    of_weight: Sequence[Tensor] = ()
    # Those of each loss, from the tokens that have it.
    of_losses: Sequence[Sequence[Tensor]] = ()


NO_NUMBERS = BatchNumbers()


@torch.no_grad()
def batch_numbers(
    outputs: Sequence[tuple[Tensor, Tensor]],
    old: Sequence[Tensor],
    micro_batches: Sequence[MicroBatch],
    objectives: Sequence[AlgorithmSection],
    *,
    step: int,
    cp_group: dist.ProcessGroup | None,
    group: dist.ProcessGroup | None,
) -> BatchNumbers:
    """Calls weight and losses for a whole mini-batch, for the numbers of it for which they ask.

    `objectives` are as in `policy_loss`. `outputs` has the policy's log-probabilities and entropies
    of each of this rank's `micro_batches`, and `old` those of the proximal policy, or nothing.
    Collective over `group`, whose ranks together have all tokens. Raises RunFailed for a faulty
    function.
    """
    parts = []
    places: list[Tensor | None] = []
    for place, (logprobs, entropy) in enumerate(outputs):
        first = logprobs if logprobs.dim() == 1 else logprobs[:, 0]
        before = old[place] if old else None
        micro_batch = micro_batches[place].to(first.device)
        parts.append(loss_inputs(first, entropy, before, micro_batch, step=step, group=cp_group))
        places.append(micro_batch.objectives)
    where = f"step {step + 1}"
    of_weight = LossInputs.joined(parts, cp_group=cp_group, group=group)
    token_weights(function_of(objectives[0], "weight"), of_weight, where)
    of_losses: list[Sequence[Tensor]] = []
    for number, objective in enumerate(objectives):
        own_parts: list[LossInputs] = []
        for part, places_of_part in zip(parts, places, strict=True):
            own_mask = tokens_of(number, part.mask, places_of_part)
            own_parts.append(dataclasses.replace(part, mask=own_mask))
        of_loss = LossInputs.joined(own_parts, cp_group=cp_group, group=group)
        token_terms(function_of(objective, "loss"), of_loss, where)
        of_losses.append(of_loss.batch.asked)
    return BatchNumbers(of_weight.batch.asked, of_losses)


def tokens_of(number: int, mask: Tensor, places: Tensor | None) -> Tensor:
    """Returns those tokens of `mask` that have the loss `number`; `places` has that of each."""
    return mask if places is None else mask & (places == number)


def loss_inputs(
    policy_logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    micro_batch: MicroBatch,
    *,
    step: int,
    group: dist.ProcessGroup | None,
) -> LossInputs:
    """Returns the tokens of a micro batch, [tokens] each; other parameters as in `policy_loss`."""
    mask = micro_batch.loss_mask
    proximal = policy_logprobs.detach() if old_logprobs is None else old_logprobs
    behavior = micro_batch.behavior_logprobs
    is_given = behavior.isnan()
    versions = micro_batch.version_logprobs
    if versions is not None:
        # The policy before the step is the version that sampled tokens of lag 0.
        versions = torch.where(is_given | (micro_batch.lags == 0), proximal, versions)
    return LossInputs(
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
        batch=RecordedSums(mask, ()),
        version_logprobs=versions,
    )
