"""Gated delta nets over packed sequences, which Megatron-Core 0.16.1 refuses.

A delta net reads the tokens of a sequence in turn. Here the tokens of a micro batch are laid out
one sequence a row for it, sequences of similar length together, so that fewer than half of the
places are padding; all other parts of the model stay packed.

The class inherits from Megatron's, so import this module only after `compat.install`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from slipstream.learner.trainer.layers.length_groups import mixed_in_rows
from slipstream.learner.trainer.layers.norms import RMSNorm
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

# Megatron's class demands the library flash-linear-attention; only its own forward pass needs it.
gated_delta_net.HAVE_FLA = True
_CHUNK_RULE: Callable[..., tuple[Tensor, Tensor | None]] = (
    gated_delta_net.chunk_gated_delta_rule or torch_chunk_gated_delta_rule
)


class PlainNorm(RMSNorm):
    """RMSNorm that multiplies by its weight, in a model whose other norms multiply by 1 + weight.

    Bridge would load and export weight - 1 and lose digits of it.
    """

    def __init__(self, config: Megatron, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        self._sums_gradients = not config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension, of this rank's heads."""
        weight: Tensor = self.weight
        if self._sums_gradients:
            # Megatron sums the gradients of tensor parallel ranks with sequence parallelism alone.
            weight = copy_to_tensor_model_parallel_region(weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class PackedDeltaNet(gated_delta_net.GatedDeltaNet):  # type: ignore[misc]
    """A gated delta net over packed tokens [tokens, 1, hidden]."""

    # Bridge reads these marks to learn that `A_log` and `dt_bias` are split like the heads.
    tensor_model_parallel = True
    partition_dim = 0

    def reset_parameters(self) -> None:
        """Fills the parameters with NaN: every weight is loaded later."""
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            torch.nn.init.constant_(parameter, torch.nan)

    def sharded_state_dict(self, prefix: str = "", *args: object, **named: object) -> Megatron:
        """Returns the state for checkpoints; an adapter's rows are split like those of `in_proj`.

        Each tensor parallel rank has rows of all parts: unsplit, other layouts would mix them up.
        """
        found = super().sharded_state_dict(prefix, *args, **named)
        name = f"{prefix}in_proj.adapter.linear_out.weight"
        if name in found:
            sizes = [self.qk_dim] * 2 + [self.v_dim] * 2 + [self.num_value_heads] * 2
            found[name] = gated_delta_net._split_tensor_factory(
                found[name],
                [size // self.tp_size for size in sizes],
                ["query", "key", "value", "z", "beta", "alpha"],
                0,
            )
        return found

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Megatron = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [tokens, 1, hidden] and no bias."""
        projected = self.in_proj(hidden_states)[0][:, 0]
        heads = self.num_v_heads_local_tp
        sizes = [self.conv_dim_local_tp, heads * self.value_head_dim, heads, heads]
        mixed, gate, beta, alpha = torch.split(projected, sizes, dim=-1)
        read = mixed_in_rows(self._mix, (mixed, beta, alpha), packed_seq_params)
        gate = gate.reshape(read.shape)
        normed = self.out_norm(read) * self.act_fn(gate.float())
        output, bias = self.out_proj(normed.to(read.dtype).flatten(1)[:, None])
        return output, bias

    def _mix(self, mixed: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        """Returns [sequences, length, heads, size of values]; trailing padding has no effect.

        `mixed` holds queries, keys and values before the convolution, [sequences, length, ...].
        """
        length = mixed.shape[1]
        mixed = self.act_fn(self.conv1d(mixed.mT)[..., :length]).mT
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        query, key, value = (
            part.reshape(*part.shape[:-1], -1, size)
            for part, size in zip(
                torch.split(mixed, [keys, keys, values], dim=-1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        copies = self.num_value_heads // self.num_key_heads
        if copies > 1:
            query, key = (x.repeat_interleave(copies, dim=2) for x in (query, key))
        # bfloat16 would round the decay of every step.
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        read, _ = _CHUNK_RULE(
            query, key, value, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True
        )
        return read
