"""Attention without TransformerEngine: packed sequences on torch's own kernel, context parallel.

The class inherits from Megatron's, so import this module only after `compat.install`.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from slipstream.learner.trainer.batches.context_parallel import gathered_places, zigzag
from slipstream.learner.trainer.model import sinks
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of packed [tokens, heads, dim] or plain [sequence, batch, heads, dim]."""

    # Bridge reads these marks to learn that the sinks are split like the heads.
    tensor_model_parallel = True
    partition_dim = 0

    def __init__(
        self,
        config: Megatron,
        layer_number: int,
        attn_mask_type: Megatron,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Megatron = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup = pg_collection.cp
        # Scores stay below this number; None: they are not capped.
        self.score_cap: float | None = getattr(config, "score_cap", None)
        # Tokens before a query that it sees; None: all of them.
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0]
        # Score of a place beside the tokens, for each head; None: there is no such place.
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = sinks.new_scores(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Megatron = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Megatron = None,
    ) -> Tensor:
        """Returns [tokens, heads * dim], or [sequence, batch, heads * dim].

        With other `cu_seqlens_kv` than `cu_seqlens_q` a sequence has more keys than queries, and
        its last keys belong to its queries. Under context parallelism packed tokens are this
        rank's, and `cu_seqlens_q` gives the bounds of the whole sequences; the call is then
        collective over the context parallel group.
        """
        if packed_seq_params is None:
            assert self.cp_group.size() == 1, "only packed sequences are split over ranks"
            rows = [x.transpose(0, 1) for x in (query, key, value)]
            assert self.window is None, "only packed sequences have windows"
            return self._attend(*rows).transpose(0, 1).flatten(2)
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        size = self.cp_group.size()
        if packed_seq_params.cu_seqlens_kv is not packed_seq_params.cu_seqlens_q:
            assert size == 1, "shared beginnings are not split over ranks"
            assert self.window is None, "shared beginnings have no windows"
            key_bounds = tuple(packed_seq_params.cu_seqlens_kv.tolist())
            return self._by_groups(
                query, key, value, *_path_groups(bounds, key_bounds, query.device)
            )
        if size > 1:
            key = GatheredRows.apply(key, self.cp_group)  # type: ignore[no-untyped-call]
            value = GatheredRows.apply(value, self.cp_group)  # type: ignore[no-untyped-call]
        split = Split(self.cp_group.rank(), size)
        groups, order = length_groups(bounds, split, self.window, query.device)
        return self._by_groups(query, key, value, groups, order)

    def _by_groups(
        self, query: Tensor, key: Tensor, value: Tensor, groups: list[LengthGroup], order: Tensor
    ) -> Tensor:
        """Attends group by group; returns [tokens, heads * dim]."""
        parts = [
            self._attend(
                rows(query, group.queries),
                rows(key, group.keys),
                rows(value, group.keys),
                group.mask,
            )[group.is_query]
            for group in groups
        ]
        return torch.cat(parts).index_select(0, order).flatten(1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attends over dim 1 of [sequences, length, heads, dim]; trailing padding has no effect.

        Without a mask, queries and keys belong to the same tokens and attention is causal.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.score_cap is not None:
            return self._attend_capped(query, key, value, mask).transpose(1, 2)
        if self.softmax_offset is not None:
            scores = self.softmax_offset
            found = sinks.attend(query, key, value, mask, scores=scores, scale=self.softmax_scale)
            return found.transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return attended.transpose(1, 2)

    def _attend_capped(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attends over dim 2 with capped scores; torch's kernel has no cap. Holds all scores."""
        assert self.score_cap is not None
        per_key = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(per_key, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * (self.softmax_scale / self.score_cap)
        scores = self.score_cap * scores.tanh()
        if mask is None:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril()
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
        return weights.to(value.dtype) @ value

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Megatron = None,
    ) -> Megatron:
        """Returns the state for distributed checkpoints: the sinks of all heads, if it has any."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)


class GatheredRows(torch.autograd.Function):
    """Gathers the rows of all ranks in rank order; a row's gradients are summed on its rank.

    Every rank holds the same number of rows: tokens, or rows of a matrix.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        """Returns the rows of all ranks of `group`; collective."""
        ctx.group = group
        whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Returns the gradient of this rank's rows; collective."""
        (grad,) = grads
        own = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


@dataclass(frozen=True)
class Split:
    """This rank's place among the context parallel ranks."""

    rank: int
    size: int


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length, which one call of the kernel handles."""

    # [sequences, longest]: places of this rank's tokens, and which of them are no padding.
    queries: Tensor
    is_query: Tensor
    # [sequences, longest]: places of all tokens of each sequence.
    keys: Tensor
    # [sequences, 1, queries, keys]: which keys a query sees; None: those up to its own place.
    mask: Tensor | None

    def to(self, device: torch.device) -> LengthGroup:
        """Returns the group with its tensors on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        queries, is_query = self.queries.to(device), self.is_query.to(device)
        return LengthGroup(queries, is_query, self.keys.to(device), mask)


def rows(tokens: Tensor, places: Tensor) -> Tensor:
    """Returns the `tokens` at `places` [sequences, length], [sequences, length, ...]."""
    return tokens.index_select(0, places.flatten()).view(*places.shape, *tokens.shape[1:])


def _seen(queries: Tensor, keys: Tensor, is_key: Tensor, window: int | None) -> Tensor:
    """Returns which of the `keys` each of the `queries` sees, [sequences, 1, queries, keys].

    Both are places [sequences, length] of the same tokens; keys that are padding are not seen.
    """
    distance = queries[:, :, None] - keys[:, None]
    mask = (distance >= 0) & is_key[:, None]
    if window is not None:
        mask &= distance <= window
    return mask[:, None]


# Layers with and without a window have groups of their own.
@functools.lru_cache(maxsize=32)
def length_groups(
    bounds: tuple[int, ...], split: Split, window: int | None, device: torch.device
) -> tuple[list[LengthGroup], Tensor]:
    """Groups sequences of similar length, so that few calls with little padding serve all.

    Returns the groups, and for each of this rank's tokens its place in the groups' queries when
    these are joined in order. A query sees the `window` tokens before it; None: all of them.
    """
    rank, size = split.rank, split.size
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(bounds):
        if end > start:
            by_class.setdefault((end - start - 1).bit_length(), []).append((start, end))
    groups, found = [], []
    for members in by_class.values():
        whole, is_token = _places(members)
        if size == 1:
            is_short = window is None or whole.shape[1] <= window + 1
            mask = None if is_short else _seen(whole, whole, is_token, window)
            group = LengthGroup(whole, is_token, whole, mask)
        else:
            own, is_own = _places([(start // size, end // size) for start, end in members])
            mask = _seen(zigzag(bounds, rank, size)[own], whole, is_token, window)
            keys = gathered_places(bounds, size)[whole]
            group = LengthGroup(own, is_own, keys, mask)
        found.append(group.queries[group.is_query])
        groups.append(group.to(device))
    return groups, torch.cat(found).argsort().to(device)


@functools.lru_cache(maxsize=16)
def _path_groups(
    bounds: tuple[int, ...], key_bounds: tuple[int, ...], device: torch.device
) -> tuple[list[LengthGroup], Tensor]:
    """Groups segments with similar numbers of queries and keys; the last keys are the queries'.

    Returns the same as `length_groups`.
    """
    by_class: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for queries, keys in zip(
        itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True
    ):
        sizes = [end - start for start, end in (queries, keys)]
        kind = ((sizes[0] - 1).bit_length(), (sizes[1] - 1).bit_length())
        by_class.setdefault(kind, []).append((queries, keys))
    groups, found = [], []
    for members in by_class.values():
        own, is_own = _places([queries for queries, _ in members])
        seen, is_seen = _places([keys for _, keys in members])
        lengths = torch.tensor([(q[1] - q[0], k[1] - k[0]) for q, k in members])
        before = (lengths[:, 1] - lengths[:, 0])[:, None, None]
        rows, columns = torch.arange(own.shape[1]), torch.arange(seen.shape[1])
        mask = (columns <= before + rows[:, None]) & is_seen[:, None]
        group = LengthGroup(own, is_own, seen, mask[:, None])
        groups.append(group.to(device))
        found.append(own[is_own])
    return groups, torch.cat(found).argsort().to(device)


def _places(members: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns [members, longest] places from start to end, padded with the last place.

    The second tensor is true where a place is no padding.
    """
    starts, ends = torch.tensor(members).unbind(1)
    places = starts[:, None] + torch.arange(int((ends - starts).max()))
    return torch.minimum(places, ends[:, None] - 1), places < ends[:, None]
