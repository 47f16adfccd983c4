"""Routers that send tokens to the experts to which the rollout sent them.

An engine and a learner with the same weights round differently, and a token whose router is
undecided goes to other experts: its log-probability then differs by far more than rounding.
Replaying the engine's choice removes that, and leaves the weights of the chosen experts to the
learner's router, so that it is trained through them. Source: rollout routing replay (R3),
arXiv:2510.11370.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from slipstream.learner.trainer.model.settings import Megatron
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.errors import RunFailed, UntrainableBatch
from slipstream.protocol.types import Trajectory
from torch import Tensor

# Megatron's choice: (scores, top_k, num_groups, group_topk) -> (chosen scores, expert ids).
_Choice = Callable[..., tuple[Tensor, Tensor]]


class LayerReplay:
    """In the place of Megatron's `RouterReplay`, of which it has the one method that routers call.

    Megatron's cannot leave a token to the router, and pairs recomputed layers with micro batches by
    their order.
    """

    def __init__(self, layer: Megatron) -> None:
        """Makes the router of a transformer layer ask it."""
        assert not layer.config.moe_router_fusion, "a fused router asks nobody"
        self._place = layer.layer_number - 1
        self._num_experts = layer.config.num_moe_experts
        self._splits_tokens = layer.config.sequence_parallel
        self._tp_group = layer.mlp.tp_group
        # Of the micro batch that the layer works on.
        self._expert_ids: Tensor | None = None
        self._is_inside = self._has_gradient = False
        # Of micro batches whose experts alone, without the rest of the layer, are computed again on
        # the way back: in the order in which they came.
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
        """Scores and ids of the experts, [tokens, top_k] both, of `scores` [tokens, experts].

        A token of which no experts are known, or not `topk` different ones, goes where the router
        sends it.
        """
        assert default_compute_topk is not None
        values, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        expert_ids = self._now()
        if expert_ids is None:
            return values, own
        given = self._of_rank(expert_ids[:, self._place], len(scores)).long()
        is_known = _are_different(given) & (given < self._num_experts).all(-1)
        # Once for each token: what is recomputed has no gradient the first time.
        if torch.is_grad_enabled():
            self._count(own, given, is_known)
        chosen = torch.where(is_known[:, None], given, own)
        return scores.gather(1, chosen), chosen

    def take_counts(self) -> Tensor | None:
        """int64: choices that differ from the router's own, and all, since the last call.

        No micro batch is under way.
        """
        # What is left was not computed again: below the first adapter nothing has a gradient.
        self._again.clear()
        counts, self._counts = self._counts, None
        return counts

    def _now(self) -> Tensor | None:
        """The experts of the micro batch that the router is asked about."""
        if not self._is_inside:
            return self._again.popleft()
        if self._has_gradient and not torch.is_grad_enabled():
            self._again.append(self._expert_ids)
        return self._expert_ids

    def _count(self, own: Tensor, given: Tensor, is_known: Tensor) -> None:
        is_other = ~(given[:, :, None] == own[:, None, :]).any(-1) & is_known[:, None]
        found = torch.stack([is_other.sum(), is_known.sum() * given.shape[1]])
        self._counts = found if self._counts is None else self._counts + found

    def _of_rank(self, expert_ids: Tensor, num_tokens: int) -> Tensor:
        """The part of this tensor parallel rank, where the ranks split the tokens."""
        if not self._splits_tokens:
            return expert_ids
        return expert_ids[self._tp_group.rank() * num_tokens :][:num_tokens]

    def _enter(self, _: Megatron, __: tuple[object, ...], named: dict[str, Any]) -> None:
        self._expert_ids = named["packed_seq_params"].expert_ids
        self._is_inside, self._has_gradient = True, torch.is_grad_enabled()

    def _leave(self, *_: object) -> None:
        self._expert_ids, self._is_inside = None, False


def _are_different(ids: Tensor) -> Tensor:
    ordered = ids.sort(dim=-1).values
    return (ordered[:, 1:] != ordered[:, :-1]).all(-1)


def replay_routers(chunks: list[Megatron]) -> list[Megatron]:
    """The change of a model that makes its routers replay; without experts given they choose."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            LayerReplay(layer)
    return chunks


def _replays(chunks: Sequence[Megatron]) -> Iterator[LayerReplay]:
    for chunk in chunks:
        for module in chunk.modules():
            replay = vars(module).get("router_replay")
            if isinstance(replay, LayerReplay):
                yield replay


def routing_metrics(
    chunks: Sequence[Megatron], ranks: Ranks, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Of what was trained since the last call; the same on every rank, collective.

    Each token passes each layer's router on one rank. RunFailed when there were experts to replay
    and no router did.
    """
    totals = torch.zeros(2, dtype=torch.int64)
    for replay in _replays(chunks):
        counts = replay.take_counts()
        if counts is not None:
            totals += counts.cpu()
    differing, replayed = ranks.sum(totals).tolist()
    unrecorded = unrecorded_fraction(trajectories)
    if unrecorded < 1 and not replayed:
        raise RunFailed("no router asked for the experts that it was to replay")
    return {
        "routing_difference": differing / max(1, replayed),
        "routing_unrecorded": unrecorded,
    }


def unrecorded_fraction(trajectories: Sequence[Trajectory]) -> float:
    """The share of tokens whose experts are not known, the last of each trajectory left out.

    Nothing is predicted behind the last one, and engines do not compute it.
    """
    recorded = [
        int(np.count_nonzero(t.routed_experts.is_recorded[:-1])) if t.routed_experts else 0
        for t in trajectories
    ]
    total = sum(max(0, len(t.token_ids) - 1) for t in trajectories)
    return 1.0 - sum(recorded) / total if total else 1.0


def check_experts(trajectories: Sequence[Trajectory], config: Megatron) -> None:
    """UntrainableBatch when the experts are those of another model than that of `config`."""
    expected = (config.num_layers, config.moe_router_topk, config.num_moe_experts)
    for trajectory in trajectories:
        routed = trajectory.routed_experts
        if routed is None:
            continue
        found = (*routed.expert_ids.shape[1:], routed.num_experts)
        if found != expected:
            raise UntrainableBatch(
                f"{trajectory.trajectory_id} has experts of {found[0]} layers, {found[1]} of "
                f"{found[2]} each, but the model has {expected[0]} layers, {expected[1]} of "
                f"{expected[2]}",
                [trajectory.trajectory_id],
            )
