"""Attention whose heads one kernel splits, normalises and rotates, on a GPU.

Megatron's own attention does so in seven kernels forward and seven back, which read and write each
head several times. The class inherits from Megatron's, so import this module only after
`compat.install`.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from slipstream.learner.trainer import Megatron
from torch import Tensor

# Heads of other sizes do not fill the kernels' blocks.
_SIZES = (16, 32, 64, 128, 256)


def are_plain(config: Megatron) -> bool:
    """Whether the kernels know the heads of a model of `config`, which computes on a GPU."""
    return (
        config.apply_rope_fusion
        and config.kv_channels in _SIZES
        and config.num_query_groups % config.tensor_model_parallel_size == 0
        and (not config.qk_layernorm or config.normalization == "RMSNorm")
        and getattr(config, "rotary_percent", 1.0) == 1.0
        and not any(
            (
                getattr(config, "has_whole_norms", False),
                config.attention_output_gate,
                config.multi_latent_attention,
                config.no_rope_freq,
                config.qk_l2_norm,
                config.rotary_interleaved,
            )
        )
    )


def fuse_heads(chunks: list[Megatron]) -> list[Megatron]:
    """Gives the attention of `chunks` the kernels, where they know its heads; returns `chunks`."""
    for attention in (module for chunk in chunks for module in chunk.modules()):
        if type(attention) is SelfAttention and are_plain(attention.config):
            attention.__class__ = FusedHeads
    return chunks


class FusedHeads(SelfAttention):  # type: ignore[misc]
    """Attention over packed sequences whose parameters have `positions`; else it is Megatron's."""

    # Positions of the tokens, and the turns of all positions, while `forward` runs.
    _rotation: tuple[Tensor, Tensor] | None = None

    def forward(self, *arguments: Megatron, **keywords: Megatron) -> Megatron:
        """Returns what Megatron's attention returns."""
        positions = getattr(keywords["packed_seq_params"], "positions", None)
        if positions is None:
            return super().forward(*arguments, **keywords)
        self._rotation = positions, _turns(keywords["rotary_pos_emb"])
        try:
            return super().forward(*arguments, **keywords | {"rotary_pos_emb": None})
        finally:
            self._rotation = None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, **keywords: Megatron
    ) -> Megatron:
        """Returns queries, keys and values, [tokens, 1, heads, head size]: normed and rotated."""
        if self._rotation is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, **keywords)
        positions, turns = self._rotation
        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        size = self.hidden_size_per_attention_head
        weights: list[Tensor | None] = []
        for norm in (self.q_layernorm, self.k_layernorm):
            has_weight = norm is not None and not isinstance(norm, IdentityOp)
            if has_weight:
                # Megatron's data parallelism waits there for weights that are still gathered.
                for hook in norm._forward_pre_hooks.values():
                    hook(norm, ())
            weights.append(norm.weight if has_weight else None)
        numbers = self.config.layernorm_epsilon, float(self.config.layernorm_zero_centered_gamma)
        parts = _SplitHeads.apply(  # type: ignore[no-untyped-call]
            mixed.contiguous().view(
                len(mixed),
                -1,
                mixed.shape[-1] // size,
                size,
            ),
            *weights,
            positions,
            turns,
            numbers,
        )
        return tuple(part[:, None] for part in parts)


def _turns(angles: Megatron) -> Tensor:
    """Returns cosines and sines, [2, positions, head size / 2]; all layers get the same tensor."""
    turns: Tensor | None = getattr(angles, "turns", None)
    if turns is None:
        # Both halves of an angle's row are the same.
        half = angles.flatten(1)[:, : angles.shape[-1] // 2]
        turns = angles.turns = torch.stack((half.cos(), half.sin()))
    return turns


class _SplitHeads(torch.autograd.Function):
    """The kernels of `head_kernels`; there are weights of both norms, or of none."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        positions: Tensor,
        turns: Tensor,
        numbers: tuple[float, float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        from slipstream.learner.trainer.layers.head_kernels import Norms, split

        ctx.norms = None
        if query_weight is not None and key_weight is not None:
            ctx.norms = Norms(query_weight, key_weight, *numbers)
        # Gradients need the projection only where it was normed: else its memory is free.
        ctx.save_for_backward(positions, turns, *([] if ctx.norms is None else [mixed]))
        ctx.shape = mixed.shape
        return split(mixed, positions, turns, ctx.norms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        from slipstream.learner.trainer.layers.head_kernels import join

        positions, turns, *mixed = ctx.saved_tensors
        normed = None if ctx.norms is None else (mixed[0], ctx.norms)
        mixed_grad = grads[0].new_empty(ctx.shape)
        sums = join(grads, positions, turns, normed, mixed_grad)
        of_queries, of_keys = (None, None) if ctx.norms is None else sums.to(ctx.norms.keys.dtype)
        return mixed_grad, of_queries, of_keys, None, None, None
