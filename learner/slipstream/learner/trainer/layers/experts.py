"""Mixtures of experts: our own layers, and functions that set up Megatron's experts too.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

import functools
from typing import Self

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import keep_buffers, own_device
from torch import Tensor

# Buffers of a router that has a bias.
_EXACT = ("expert_bias", "local_tokens_per_expert")


def mark_experts(chunks: list[Megatron]) -> list[Megatron]:
    """Marks the experts' parameters so that gradients and norms are summed over the right ranks.

    Megatron marks them only when `ep` > 1. Without the mark it treats them as copies on the data
    parallel ranks, which is wrong where `etp` differs from `tp`. TransformerEngine's experts also
    lack the mark that makes the gradient norm count the parts on all tensor parallel ranks. Biases
    and counts of routers are kept in float32. Call this before the chunks are wrapped for data
    parallelism. Returns `chunks`.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False
                parameter.tensor_model_parallel = True
        for module in chunk.modules():
            if getattr(module, "expert_bias", None) is not None:
                # Megatron casts the bias back to float32 after it was rounded: tokens would go to
                # other experts. In 16 bits it would count no further than some hundred tokens.
                keep_buffers(module, _EXACT)
    return chunks


class GroupedLinear(MegatronModule):  # type: ignore[misc]
    """One matrix for each expert of this rank, named as in TransformerEngine: weight0, weight1...

    With biases, each expert also has a bias: bias0, bias1... Bridge loads and exports only
    parameters of these names. Each matrix is this rank's part, split along `partition_dim` over the
    expert tensor parallel ranks.
    """

    # Bridge reads this mark to learn that a module is split.
    tensor_model_parallel = True

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        *,
        partition_dim: int,
        config: Megatron,
        groups: Megatron,
        is_gated: bool = False,
        has_bias: bool = False,
    ) -> None:
        """Creates this rank's parts of matrices of `shape` [out, in]; they are NaN until loaded.

        With `is_gated` the first half of the rows is the gate, the second half the up projection.
        `groups` are Megatron's process groups.
        """
        super().__init__(config)
        self.partition_dim = partition_dim
        self.is_gated = is_gated
        self.num_experts = num_experts
        self.kinds = ("weight", "bias") if has_bias else ("weight",)
        self.groups = groups
        # Low-rank adapters of the matrices; None if there are none.
        self.adapter: Megatron = None
        # Every parameter is loaded later; NaN reveals one that was not.
        filled = functools.partial(torch.full, dtype=config.params_dtype, device=own_device(config))
        for place in range(num_experts):
            weight = torch.nn.Parameter(filled(shape, torch.nan))
            # Muon puts the matrix together along it.
            weight.partition_dim = partition_dim  # type: ignore[attr-defined]
            self.register_parameter(f"weight{place}", weight)
            if has_bias:
                self.register_parameter(
                    f"bias{place}", torch.nn.Parameter(filled(shape[:1], torch.nan))
                )

    def forward(self, inputs: Tensor, expert: int) -> Tensor:
        """Maps [tokens, in] to [tokens, out] by an expert's matrix and adapter, without bias."""
        outputs = F.linear(inputs, self.get_parameter(f"weight{expert}"))
        if self.adapter is not None and self.adapter.is_enabled:
            outputs = outputs + self.adapter(inputs, expert)
        return outputs

    def like(self, shape: tuple[int, int], **settings: Megatron) -> Self:
        """Returns matrices of another shape for the same experts, without biases."""
        shared_settings = {"config": self.config, "groups": self.groups}
        return GroupedLinear(self.num_experts, shape, **shared_settings, **settings)

    def sharded_tensors(
        self, key: str, offsets: tuple[tuple[int, int, int], ...], metadata: Megatron
    ) -> dict[str, Megatron]:
        """Returns this rank's experts by name, as parts of one tensor of all, `key` + kind."""
        first = self.groups.ep.rank() * self.num_experts
        total = self.groups.ep.size() * self.num_experts
        parts = {}
        for place in range(self.num_experts):
            of_expert = (*offsets, (len(offsets), first + place, total))
            for kind in self.kinds:
                sharded = make_sharded_tensors_for_checkpoint(
                    {kind: self.get_parameter(f"{kind}{place}")},
                    key,
                    {"weight": self.partition_dim},
                    of_expert,
                    tp_group=self.groups.expt_tp,
                    dp_cp_group=metadata["dp_cp_group"],
                )[f"{key}{kind}"]
                # Copies are on the expert data parallel ranks, fewer than the data parallel ranks.
                sharded.replica_id = (*sharded.replica_id[:2], self.groups.expt_dp.rank())
                if self.is_gated:
                    sharded = apply_swiglu_sharded_factory(sharded, of_expert)
                parts[f"{kind}{place}"] = sharded
        return parts


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The gated MLPs of this rank's experts, computed one after another."""

    def __init__(
        self, num_local_experts: int, config: Megatron, pg_collection: Megatron = None, **_: object
    ) -> None:
        super().__init__(config)
        assert config.gated_linear_unit
        hidden = config.hidden_size
        inner = divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        new_linear = functools.partial(
            GroupedLinear,
            num_local_experts,
            config=config,
            groups=pg_collection,
            has_bias=config.add_bias_linear,
        )
        self.linear_fc1 = new_linear((2 * inner, hidden), partition_dim=0, is_gated=True)
        self.linear_fc2 = new_linear((hidden, inner), partition_dim=1)

    def forward(
        self, hidden_states: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Returns [tokens, hidden] for tokens sorted by expert, each weighted by its `probs`.

        The second result, a bias, is None. Experts without tokens are computed too, so that they
        have a gradient of 0: a reduction that overlaps the backward pass would wait for a missing
        gradient.
        """
        limit: float | None = self.config.activation_func_clamp_value
        sizes = tokens_per_expert.tolist()
        outputs = []
        parts = zip(torch.split(hidden_states, sizes), torch.split(probs, sizes), strict=True)
        for expert, (tokens, weights) in enumerate(parts):
            weights = weights[:, None]
            inner = self.linear_fc1(tokens, expert)
            if self.config.add_bias_linear:
                inner = inner + self.linear_fc1.get_parameter(f"bias{expert}")
            gate, up = inner.chunk(2, dim=-1)
            if limit is not None:
                gate = gate.clamp(max=limit)
                up = up.clamp(-limit, limit)
            inner = self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
            inner = (inner * weights).to(inner.dtype)
            output = self.linear_fc2(inner, expert)
            if self.config.add_bias_linear:
                bias = self.linear_fc2.get_parameter(f"bias{expert}")
                output = (output + bias * weights).to(output.dtype)
            outputs.append(output)
        return torch.cat(outputs), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Megatron = None,
    ) -> Megatron:
        """Returns the state for distributed checkpoints, in the form used by TransformerEngine."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Megatron] = {}
        for name in ("linear_fc1", "linear_fc2"):
            matrices = {name: self.get_submodule(name)}
            if matrices[name].adapter is not None:
                for factor in ("first", "second"):
                    path = f"{name}.adapter.{factor}"
                    matrices[path] = self.get_submodule(path)
            for path, module in matrices.items():
                parts = module.sharded_tensors(
                    f"{prefix}experts.{path}.", sharded_offsets, metadata
                )
                state |= {f"{prefix}{path}.{kind}": part for kind, part in parts.items()}
        return state
