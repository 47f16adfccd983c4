"""Replay of routing: each token goes to the experts that the engine chose for it.

An engine and a trainer with the same weights round differently. A token whose experts have almost
equal scores may then go to other experts, and its log-probability differs by far more than
rounding. Replaying the engine's choice removes this difference. The weights of the chosen experts
still come from the trainer's router, which is therefore trained. Source: rollout routing replay
(R3), arXiv:2510.11370.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.layers.routers import sparse_layers
from slipstream.learner.trainer.model.model_part import ModelPart
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart
from torch import Tensor

# Megatron's choice: (scores, top_k, num_groups, group_topk) -> (chosen scores, expert ids).
_Choice = Callable[..., tuple[Tensor, Tensor]]


class LayerReplay:
    """Replaces Megatron's `RouterReplay` in one layer, with the one method that routers call.

    Megatron's class cannot let the router choose for single tokens, and pairs recomputed layers
    with micro batches by their order.
    """

    def __init__(self, layer: Megatron) -> None:
        """Makes the router of a transformer layer call this object."""
        assert not layer.config.moe_router_fusion, "a fused router does not call RouterReplay"
        self._place = layer.layer_number - 1
        self._num_experts = layer.config.num_moe_experts
        self._splits_tokens = layer.config.sequence_parallel
        self._tp_group = layer.mlp.tp_group
        # Experts of the current micro batch; None if the router chooses.
        self._expert_ids: Tensor | None = None
        self._is_inside = self._has_gradient = False
        # Experts of micro batches whose expert MLPs, but not the rest of the layer, are recomputed
        # in the backward pass; in the order of the forward pass.
        self._again: deque[Tensor | None] = deque()
        self._counts: Tensor | None = None
        layer.mlp.router.router_replay = self
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: _Choice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and ids of the chosen experts, both [tokens, top_k].

        `scores` is [tokens, experts]. The router itself chooses for a token without a record of
        `topk` different, valid experts.
        """
        assert default_compute_topk is not None
        values, own_ids = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if not self._is_inside:
            expert_ids = self._again.popleft()
        else:
            expert_ids = self._expert_ids
            if self._has_gradient and not torch.is_grad_enabled():
                self._again.append(expert_ids)
        if expert_ids is None:
            return values, own_ids
        recorded_ids = expert_ids[:, self._place].long()
        if self._splits_tokens:
            recorded_ids = recorded_ids[self._tp_group.rank() * len(scores) :][: len(scores)]
        ordered = recorded_ids.sort(dim=-1).values
        are_different = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
        is_known = are_different & (recorded_ids < self._num_experts).all(-1)
        # Every token is counted once: the first pass of a recomputed layer has no gradient.
        if torch.is_grad_enabled():
            is_other = (
                ~(recorded_ids[:, :, None] == own_ids[:, None, :]).any(-1) & is_known[:, None]
            )
            counts = torch.stack([is_other.sum(), is_known.sum() * recorded_ids.shape[1]])
            self._counts = counts if self._counts is None else self._counts + counts
        chosen_ids = torch.where(is_known[:, None], recorded_ids, own_ids)
        return scores.gather(1, chosen_ids), chosen_ids

    def take_counts(self) -> Tensor | None:
        """Returns two counts: replayed choices that differ from the router's own, and all of them.

        The result, int64 [2], is for the time since the last call; None if nothing was replayed.
        Call this only between micro batches.
        """
        # Remaining entries were not recomputed: layers below the first adapter have no gradient.
        self._again.clear()
        counts = self._counts
        self._counts = None
        return counts

    def _enter(
        self,
        _: Megatron,
        __: tuple[object, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._expert_ids = keywords["packed_seq_params"].expert_ids
        self._is_inside, self._has_gradient = True, torch.is_grad_enabled()

    def _leave(self, *_: object) -> None:
        self._expert_ids = None
        self._is_inside = False


def replay_routers(chunks: list[Megatron]) -> list[Megatron]:
    """Makes a model's routers replay recorded experts; returns `chunks`.

    A router chooses itself for tokens without a record.
    """
    for chunk in chunks:
        for layer in sparse_layers(chunk):
            LayerReplay(layer)
    return chunks


class Routing(StepPart):
    """Compares the experts that the routers chose with those that the engine recorded."""

    def __init__(self, chunks: Sequence[Megatron]) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        replays = [vars(module).get("router_replay") for module in modules]
        self._layers = [replay for replay in replays if isinstance(replay, LayerReplay)]

    def begins(self) -> None:
        """Forgets what was counted in a batch that was set aside."""
        for layer in self._layers:
            layer.take_counts()

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Returns routing metrics of the batch's training, equal on every rank; collective.

        Sums over ranks count each token once: it passes each layer's router on only one rank, and
        its record is counted where its statistics are. Raises RunFailed if there were recorded
        experts and no router replayed them.
        """
        ranks = policy.ranks
        totals = torch.zeros(4, dtype=torch.int64)
        for layer in self._layers:
            if (counts := layer.take_counts()) is not None:
                totals[:2] += counts.cpu()
        # A rank that holds all experts counts for the others, too.
        is_counted = ranks.is_main
        if batch.recorded_here is not None:
            is_counted = ranks.counts and ranks.cp_rank == 0
        if is_counted:
            totals[2:] += torch.tensor(batch.recorded_tokens())
        differing, replayed, recorded, num_tokens = ranks.sum(totals).tolist()
        if recorded and not replayed:
            raise RunFailed("no router replayed the recorded experts")
        difference = differing / max(1, replayed)
        unrecorded = 1.0 - recorded / num_tokens if num_tokens else 1.0
        return {"routing_difference": difference, "routing_unrecorded": unrecorded}


def step_part(_: Config, policy: Policy) -> Routing:
    """Returns the part that compares the routers' experts with the engine's."""
    return Routing(policy.chunks)


class ReplayPart(ModelPart):
    """Makes the policy's routers replay what the engine recorded."""

    def __init__(self, _: Config) -> None:
        pass

    def changed(self, chunks: list[Megatron]) -> list[Megatron]:
        return replay_routers(chunks)
