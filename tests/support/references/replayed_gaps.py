"""How far a policy's log-probabilities are from those that a batch was sampled with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.core.types import RoutedExperts, Trajectory

if TYPE_CHECKING:
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.model.policy import Policy


class ReplayedGaps:
    """Log-probability gaps of a batch's sampled tokens: with own experts, and with replayed ones.

    A gap is |policy_logprob - behavior_logprob|; replayed experts are those of the rollout.
    """

    def __init__(self, policy: Policy, batch: Batch, config: Config) -> None:
        from slipstream.learner.trainer.algorithms.loss import training_sequences
        from slipstream.learner.trainer.model.schedule import rank_micro_batches

        self._policy = policy
        sequences = training_sequences(batch, config)
        self._share = rank_micro_batches(policy, sequences, range(len(sequences)))

    def both(self, suffix: str) -> dict[str, float]:
        """Mean gaps, as metrics whose names end with `suffix`."""
        return {
            f"gap_own{suffix}": self._mean(replayed=False),
            f"gap_replayed{suffix}": self._mean(replayed=True),
        }

    def _mean(self, *, replayed: bool) -> float:
        from slipstream.learner.trainer.model.schedule import forward_logprobs

        share = self._share
        if not replayed:
            share = [
                dataclasses.replace(micro_batch, expert_ids=None)
                for micro_batch in share
            ]
        all_logprobs = forward_logprobs(self._policy, share, temperature=1.0)
        gaps = [
            (logprobs.float().cpu() - micro_batch.behavior_logprobs).abs()[
                micro_batch.loss_mask
            ]
            for logprobs, micro_batch in zip(all_logprobs, share, strict=True)
        ]
        return float(torch.cat(gaps).mean())


def sampled_by(policy: Policy, trajectory: Trajectory) -> Trajectory:
    """Returns `trajectory` with log-probabilities (temperature 1) and experts of `policy`."""
    from slipstream.learner.trainer.model.schedule import sequence_logprobs

    maps: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(
            lambda *inputs_and_outputs: maps.append(inputs_and_outputs[2][1])
        )
        for module in policy.chunks[0].modules()
        if "router_replay" in vars(module)
    ]
    length = len(trajectory.token_ids)
    (logprobs,) = sequence_logprobs(policy, [trajectory.token_ids])
    for hook in hooks:
        hook.remove()
    top_k = policy.chunks[0].config.moe_router_topk
    experts = torch.stack(
        [expert_map[:length].float().topk(top_k).indices for expert_map in maps], dim=1
    )
    return dataclasses.replace(
        trajectory,
        behavior_logprobs=logprobs[trajectory.sampled_mask()[1:]],
        routed_experts=RoutedExperts(
            experts.numpy().astype(np.uint8), policy.chunks[0].config.num_moe_experts
        ),
    )


def disturb_routers(
    chunks: list[torch.nn.Module], *, scale: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Moves every router's weights by `scale` of their size; returns them, and what they were."""
    generator = torch.Generator().manual_seed(0)
    changed = []
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if name.endswith(".router.weight"):
                changed.append((weight, weight.detach().clone()))
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.data.add_(
                    scale * weight.detach().float().std().to(weight) * noise
                )
    return changed
