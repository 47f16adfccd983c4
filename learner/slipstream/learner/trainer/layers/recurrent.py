"""Gated delta nets, which read the tokens of a sequence in turn.

Megatron-Core 0.19.2 needs extra kernels for them, which have no form for CPUs.
Here such a layer gets the tokens of a micro batch with one sequence in each row. Sequences of
similar length are computed together, so that less than half of the entries are padding. All other
parts of the model stay packed. Source: arXiv:2412.06464.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common as delta_nets
from megatron.core.ssm.gated_delta_net import gdn
from megatron.core.ssm.gated_delta_net.common import (
    _build_head_perm_for_split_sections,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.training_sequence import gathered_places
from slipstream.learner.trainer.layers.attention import mixed_in_rows
from slipstream.learner.trainer.layers.norms import RMSNorm
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

# Megatron's class demands the library flash-linear-attention; only its own forward pass needs it.
delta_nets.HAVE_FLA = True
gdn.chunk_gated_delta_rule = gdn.chunk_gated_delta_rule or torch_chunk_gated_delta_rule


class PlainNorm(RMSNorm):
    """RMSNorm that multiplies by its weight, in a model whose other norms multiply by 1 + weight.

    If this norm also used 1 + weight, Bridge would load and export weight - 1 and lose digits.
    """

    def __init__(
        self,
        config: Megatron,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self._sums_gradients = not config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, this rank's heads, normalised over the last dimension."""
        weight: Tensor = self.weight
        if self._sums_gradients:
            # Megatron sums gradients of tensor parallel ranks only with sequence parallelism.
            weight = copy_to_tensor_model_parallel_region(weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class PackedDeltaNet(gdn.GatedDeltaNet):  # type: ignore[misc]
    """A gated delta net over packed [tokens, 1, hidden]; context parallel ranks share heads."""

    # Bridge reads these marks to learn that `A_log` and `dt_bias` are split like the heads.
    tensor_model_parallel = True
    partition_dim = 0

    def reset_parameters(self) -> None:
        """Fills the parameters with NaN: every weight is loaded later."""
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            torch.nn.init.constant_(parameter, torch.nan)

    def sharded_state_dict(self, prefix: str = "", *args: object, **named: object) -> Megatron:
        """Returns the state for checkpoints; rows of an adapter are split like rows of `in_proj`.

        Each tensor parallel rank has rows of all parts. A load in another layout would mix up the
        parts if they were not split.
        """
        state = super().sharded_state_dict(prefix, *args, **named)
        name = f"{prefix}in_proj.adapter.linear_out.weight"
        if name in state:
            state[name] = _split_tensor_factory(
                state[name],
                list(self.in_proj_split_sections),
                self.in_proj_split_names,
                0,
            )
        return state

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Megatron = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output [tokens, 1, hidden], and None for the bias."""
        projected = self.in_proj(hidden_states)[0][:, 0]
        heads = self.num_v_heads_local_tp
        sizes = [self.conv_dim_local_tp, heads * self.value_head_dim, heads, heads]
        mixed, gate, beta, alpha = torch.split(projected, sizes, dim=-1)
        tokens = [mixed, beta, alpha]
        places = None
        if self.cp_size > 1:
            bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
            places = gathered_places(bounds, self.cp_size).to(projected.device)
            tokens = self._whole_sequences(tokens, places)
        read = mixed_in_rows(self._mix, tokens, packed_seq_params)
        if places is not None:
            exchanged: Tensor = tensor_a2a_hp2cp(
                read.index_select(0, places.argsort()).flatten(1)[:, None],
                seq_dim=0,
                head_dim=-1,
                cp_group=self.pg_collection.cp,
                redo_attention_load_balancing=False,
            )
            read = exchanged.view(len(exchanged), -1, self.value_head_dim)
        gate = gate.reshape(read.shape)
        normed = self.out_norm(read) * self.act_fn(gate.float())
        output, bias = self.out_proj(normed.to(read.dtype).flatten(1)[:, None])
        return output, bias

    def _whole_sequences(self, tokens: list[Tensor], places: Tensor) -> list[Tensor]:
        """Exchanges this rank's tokens of all heads for all tokens, in order, of its heads."""
        keys = self.qk_dim_local_tp
        values = self.v_dim_local_tp
        heads = self.num_v_heads_local_tp
        parts = (keys, keys, values, heads, heads)
        joined = torch.cat(tokens, dim=-1)
        order = _build_head_perm_for_split_sections(parts, self.cp_size, joined.device)
        all_tokens = tensor_a2a_cp2hp(
            joined.index_select(-1, order)[:, None],
            seq_dim=0,
            head_dim=-1,
            cp_group=self.pg_collection.cp,
            undo_attention_load_balancing=False,
        )
        sizes = [tensor.shape[-1] // self.cp_size for tensor in tokens]
        return list(all_tokens[:, 0].index_select(0, places).split(sizes, dim=-1))

    def _mix(
        self,
        mixed: Tensor,
        beta: Tensor,
        alpha: Tensor,
    ) -> Tensor:
        """Returns the outputs of the delta rule, [sequences, length, heads, size of values].

        `mixed` holds queries, keys and values before the convolution, [sequences, length, ...].
        Trailing padding has no effect.
        """
        length = mixed.shape[1]
        parts = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        # The parts of parameters for the heads that this context parallel rank mixes.
        group = self.pg_collection.cp
        filters = get_parameter_local_cp(self.conv1d.weight, 0, group, parts)
        rate, bias = (
            get_parameter_local_cp(parameter, 0, group) for parameter in (self.A_log, self.dt_bias)
        )
        padding = self.conv1d.padding
        groups = len(filters)
        convolved = F.conv1d(
            mixed.mT,
            filters,
            padding=padding,
            groups=groups,
        )
        mixed = self.act_fn(convolved[..., :length]).mT
        sizes = (self.key_head_dim, self.key_head_dim, self.value_head_dim)
        split = torch.split(mixed, [part // self.cp_size for part in parts], dim=-1)
        query, key, value = (
            part.reshape(*part.shape[:-1], -1, size)
            for part, size in zip(split, sizes, strict=True)
        )
        copies = self.num_value_heads // self.num_key_heads
        if copies > 1:
            query, key = (x.repeat_interleave(copies, dim=2) for x in (query, key))
        # bfloat16 would round the decay of every step.
        decay = -rate.float().exp() * F.softplus(alpha.float() + bias.float())
        read: Tensor = gdn.chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=beta.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )[0]
        return read
