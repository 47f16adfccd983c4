"""Attention without TransformerEngine: packed sequences, torch's own kernel, context parallelism.

Attention with sinks is computed here on every device. A sink is a learnt score without a value, and
TransformerEngine 2.11 has no kernel with sinks for packed sequences (`get_attention_backend` in its
`dot_product_attention/utils.py`).

Here are also Megatron's parameters of packed sequences, extended by replayed experts, padding and
shared prefixes. The classes inherit from Megatron's, so import this module only after
`compat.install`.
"""

import math
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.micro_batch import Paths
from slipstream.learner.trainer.layers import own_device
from slipstream.learner.trainer.layers.length_groups import (
    MOST_SCORES,
    LengthGroup,
    Masks,
    length_groups,
    path_groups,
    rows,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
        # Number of tokens before a query that the query sees; None for all of them.
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0]
        self.most_scores = MOST_SCORES
        # Sink of each head: a learnt score without a value. None if there are no sinks.
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = new_scores(config)

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
        """Returns the attention output, [tokens, heads * dim] or [sequence, batch, heads * dim].

        Where `cu_seqlens_kv` differs from `cu_seqlens_q`, a sequence has more keys than queries:
        its queries align with its last keys. Under context parallelism the packed tokens are this
        rank's, and `cu_seqlens_q` gives the bounds of the whole sequences; the call is then
        collective over the context parallel group.
        """
        if packed_seq_params is None:
            assert self.cp_group.size() == 1, "only packed sequences are split over ranks"
            assert self.window is None, "only packed sequences have windows"
            plain = [x.transpose(0, 1) for x in (query, key, value)]
            return self._attend(*plain).transpose(0, 1).flatten(2)
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        size = self.cp_group.size()
        if packed_seq_params.cu_seqlens_kv is not packed_seq_params.cu_seqlens_q:
            assert size == 1, "shared prefixes are not split over ranks"
            assert self.window is None, "shared prefixes have no windows"
            key_bounds = tuple(packed_seq_params.cu_seqlens_kv.tolist())
            return self._by_groups(
                query, key, value, *path_groups(bounds, key_bounds, query.device)
            )
        if size > 1:
            key = GatheredRows.apply(key, self.cp_group)  # type: ignore[no-untyped-call]
            value = GatheredRows.apply(value, self.cp_group)  # type: ignore[no-untyped-call]
        masks = Masks(self.window, self.most_scores)
        split = (self.cp_group.rank(), size)
        return self._by_groups(
            query, key, value, *length_groups(bounds, split, masks, query.device)
        )

    def _by_groups(
        self, query: Tensor, key: Tensor, value: Tensor, groups: list[LengthGroup], order: Tensor
    ) -> Tensor:
        """Computes [tokens, heads * dim]; `order` has each token's index in the groups' outputs."""
        parts = [
            self._attend_group(query, key, value, group)
            if group.band is None
            # Activations of all blocks would not fit: the backward pass recomputes each block.
            else checkpoint(
                self._attend_group,
                *(query, key, value, group),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for group in groups
        ]
        return torch.cat(parts).index_select(0, order).flatten(1)

    def _attend_group(
        self, query: Tensor, key: Tensor, value: Tensor, group: LengthGroup
    ) -> Tensor:
        """Returns the attention output of a group, [tokens of the group, heads, dim]."""
        mask = group.mask if group.band is None else group.band.mask(group)
        own = rows(query, group.queries)
        found = self._attend(own, rows(key, group.keys), rows(value, group.keys), mask)
        return found[group.is_query]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Computes attention over dim 1 of [sequences, length, heads, dim].

        Trailing padding has no effect. Without a mask, queries and keys belong to the same tokens
        and attention is causal.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.softmax_offset is not None:
            scores = self.softmax_offset
            found = attend(query, key, value, mask, scores=scores, scale=self.softmax_scale)
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

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Megatron = None,
    ) -> Megatron:
        """Returns the state for distributed checkpoints: the sinks of all heads, if any."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)


class GatheredRows(torch.autograd.Function):
    """Gathers the rows of all ranks in rank order; the backward pass sums a row's gradients.

    Every rank holds the same number of rows, which are tokens or rows of a matrix, and gets the
    summed gradients of its own rows.
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


_MATRICES = ("linear_q_down_proj", "linear_kv_down_proj")


def make_whole_vectors(chunks: list[Megatron]) -> list[Megatron]:
    """Makes latent attention gather the weights of its down projections instead of their outputs.

    Sequence parallelism must split the tokens. Returns `chunks`.
    """
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for name in _MATRICES:
                matrix = getattr(layer.self_attention, name, None)
                if matrix is not None:
                    matrix.forward = types.MethodType(_whole_vectors, matrix)
    return chunks


def _whole_vectors(matrix: Megatron, tokens: Tensor) -> tuple[Tensor, None]:
    """Multiplies this rank's `tokens` by the whole matrix, gathered from all ranks; collective."""
    weight = GatheredRows.apply(matrix.weight, matrix.tp_group)  # type: ignore[no-untyped-call]
    return F.linear(tokens, weight), None


def new_scores(config: Megatron) -> torch.nn.Parameter:
    """Returns a parameter for the sink scores of this rank's heads, NaN until it is loaded."""
    own = config.num_attention_heads // config.tensor_model_parallel_size
    # NaN reveals scores that were not loaded.
    scores = torch.nn.Parameter(
        torch.full((own,), torch.nan, dtype=config.params_dtype, device=own_device(config))
    )
    # The gradient norm counts the scores of all ranks.
    scores.tensor_model_parallel = True  # type: ignore[attr-defined]
    return scores


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scores: Tensor, scale: float
) -> Tensor:
    """Computes attention over dim 2 of [sequences, heads, length, dim], with a sink per query head.

    The sink is an extra first key. Its scores come from extra head dimensions, two for each query
    head that shares the key head; these dimensions are 0 in all other keys. So torch's fast kernels
    compute attention with sinks without storing the scores. `scores` has the sink of each query
    head. Without a mask attention is causal, and a dummy query precedes the others.
    """
    is_causal = mask is None
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    length, dim = query.shape[2:]
    groups = key.shape[1]
    per_group = query.shape[1] // groups
    # Two dimensions for each: 1 / scale may have more digits than the element type.
    large = torch.tensor(1.0 / scale, dtype=query.dtype, device=query.device)
    small = (1.0 / scale - large.double()).to(query.dtype)
    chosen = torch.eye(per_group, dtype=query.dtype, device=query.device).repeat(groups, 1)
    chosen = torch.cat([chosen * large, chosen * small], dim=-1)[None, :, None]
    query = torch.cat([query, chosen.expand(len(query), -1, length, -1)], dim=-1)
    by_group = scores.to(key.dtype).view(1, groups, 1, per_group).expand(len(key), -1, -1, -1)
    sink = torch.cat([by_group.new_zeros(len(key), groups, 1, dim), by_group, by_group], dim=-1)
    key = torch.cat([sink, F.pad(key, (0, 2 * per_group))], dim=2)
    value = F.pad(value, (0, 2 * per_group, 1, 0))
    found = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=per_group > 1,
    )[..., :dim]
    return found[:, :, 1:] if is_causal else found


@dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """Packed-sequence parameters with what routers need to know of the tokens.

    Megatron passes this object to every layer, also when it recomputes the layer, so that each
    router gets the experts of the current micro batch.
    """

    # Same as `MicroBatch.expert_ids`; None if the routers choose.
    expert_ids: Tensor | None = None
    # Same as `MicroBatch.is_padding`.
    is_padding: Tensor | None = None


@dataclass
class SharedSequences(RoutedSequences):
    """Packed-sequence parameters of a micro batch whose sequences share prefixes.

    Megatron's own fields describe the micro batch as one sequence; `PrefixSharing` gives each token
    the rotary angles of its position. The bounds of the segments are in `bounds` and `paths`.
    """

    bounds: Tensor | None = None
    max_queries: int = 0
    paths: Paths | None = None


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int, cp_size: int) -> Megatron:
    """Returns Megatron's parameters of packed sequences; the arguments are as in `MicroBatch`."""
    packed = RoutedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    if cp_size > 1:
        # TransformerEngine requires these fields; trailing padding needs no mask of its own. They
        # are the same tensor as `cu_seqlens_q`, so that TransformerEngine knows, without a wait for
        # the device, that there are no gaps between sequences.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
    return packed
