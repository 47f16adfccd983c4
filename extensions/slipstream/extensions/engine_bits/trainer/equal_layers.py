"""Megatron's layers with the engine's kernels, for `algorithm.agreement = "bits"`.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

import functools
import importlib

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from slipstream.extensions.engine_bits.trainer import engine_kernels
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import mlp_parts
from slipstream.learner.trainer.layers.attention import CoreAttention
from slipstream.learner.trainer.layers.norms import RMSNorm
from torch import Tensor

Output = tuple[Tensor, Tensor | None]


class EqualColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """The engine's linear layer in place of Megatron's column-parallel layer."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Output:
        """Returns (product with bias, None), or (product, bias) if the caller must add the bias."""
        own = self.weight if weight is None else weight
        added = None if self.skip_bias_add else self.bias
        found = engine_kernels.product(input_, own, added)
        return found, self.bias if self.skip_bias_add else None


class EqualRowLinear(RowParallelLinear):  # type: ignore[misc]
    """The engine's linear layer in place of Megatron's row-parallel layer."""

    def forward(self, input_: Tensor) -> Output:
        """Returns (product with bias, None); Megatron's layer leaves the bias to the caller."""
        return engine_kernels.product(input_, self.weight, self.bias), None


class SumNorm(RMSNorm):
    """The norm of the residual stream after the output of attention or an MLP was added."""

    is_sum = True

    def forward(self, x: Tensor) -> Tensor:
        return engine_kernels.norm(x, self.weight, float(self.eps or 0.0), is_sum=self.is_sum)


class PlainInputNorm(SumNorm):
    """The norm of inputs that are not residual sums: embeddings, queries and keys."""

    is_sum = False


class EqualAttention(CoreAttention):
    """Causal attention of packed [tokens, heads, dim] with the engine's kernel."""

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
        """Returns attention by the engine's kernel, [tokens, heads * dim].

        On CPUs `CoreAttention` computes the gradients.
        """
        assert packed_seq_params is not None, "the engine's kernel takes packed sequences"
        whole = super().forward

        def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found = whole(query, key, value, None, packed_seq_params=packed_seq_params)
            return found.view(len(query), -1, value.shape[-1])

        bounds = packed_seq_params.cu_seqlens_q
        found = engine_kernels.attention(query, key, value, bounds, self.softmax_scale, reference)
        return found.flatten(1)


def equal_parts(layer: Megatron, *, is_first: bool) -> None:
    """Replaces classes in the spec of a layer by classes of this module.

    `is_first` tells whether the layer reads the embeddings, which are no residual sum.
    """
    attention, mlp = layer.self_attention.submodules, mlp_parts(layer)
    layer.input_layernorm = PlainInputNorm if is_first else SumNorm
    layer.pre_mlp_layernorm = SumNorm
    attention.core_attention = EqualAttention
    attention.linear_qkv = mlp.linear_fc1 = EqualColumnLinear
    attention.linear_proj = mlp.linear_fc2 = EqualRowLinear
    if attention.q_layernorm is RMSNorm:
        attention.q_layernorm = attention.k_layernorm = PlainInputNorm


def _gated(x: Tensor, bias: Tensor | None, *_: object) -> Tensor:
    assert bias is None, "the model has no biases in its MLP"
    return engine_kernels.gated(x)


@functools.cache
def install() -> None:
    """Makes Megatron compute SwiGLU and rotary embeddings with the engine's kernels.

    The kernel for rotary embeddings is used only by models whose `agreement` is "bits". The kernel
    for SwiGLU is used by all models of the process that have Megatron's `bias_activation_fusion`,
    so from then on only models with the layers of this module may have that setting.
    """
    engine_kernels.engine_kernels()
    AutoMapping.register_module_type("EqualColumnLinear", "column")
    AutoMapping.register_module_type("EqualRowLinear", "row")
    for name in ("SumNorm", "PlainInputNorm"):
        AutoMapping.register_module_type(name, "replicated")
    mlp: Megatron = importlib.import_module("megatron.core.transformer.mlp")
    mlp.bias_swiglu_impl = _gated
    module: Megatron = importlib.import_module("megatron.core.transformer.attention")
    original = module.apply_rotary_pos_emb

    @functools.wraps(original)
    def rotated(x: Tensor, freqs: Tensor, config: Megatron, **named: Megatron) -> Tensor:
        def reference(x: Tensor) -> Tensor:
            found: Tensor = original(x, freqs, config=config, **named)
            return found

        if getattr(config, "agreement", "close") != "bits":
            return reference(x)
        bounds = named["cu_seqlens"]
        places = torch.arange(len(x), device=x.device)
        starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        # The angles of position 1 are the frequencies.
        angles = torch.einsum("i,j->ij", places.float(), freqs[1].flatten()[: x.shape[-1] // 2])
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)
        halves = not config.rotary_interleaved
        positions = places - starts
        return engine_kernels.rotated(positions, x, table, halves=halves, reference=reference)

    module.apply_rotary_pos_emb = rotated
