"""Recipes for Qwen3.5, dense and with experts: Qwen3-Next's layers behind Qwen3-VL's tower.

Importing this module after Bridge registers the recipes: see `compat.install`.
"""

from __future__ import annotations

import torch
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    MegatronParamMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.families.fused_experts import FusedExperts, fused_experts
from slipstream.learner.trainer.families.mappings import (
    ATTENTION,
    DECODER,
    LAYER,
    FamilyBridge,
    ends,
    experts,
    gated,
    norms_before,
)
from slipstream.learner.trainer.families.qwen3_next import (
    DELTA_NET,
    delta_nets,
    set_delta_nets,
    set_shared_expert,
    shared_expert,
)
from slipstream.learner.trainer.families.vision import VisionBridge
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

# The files' names of the projections into a delta net, in the order of Megatron's rows.
_INPUTS = ("qkv", "z", "b", "a")


class _Inputs(MegatronParamMapping):  # type: ignore[misc]
    """The projections into a delta net: one matrix in Megatron, four in the files.

    A rank's matrix has its heads' rows of queries, keys, values, gates, betas and alphas.
    """

    def __init__(self, megatron_param: str, hf_param: dict[str, str]) -> None:
        super().__init__(megatron_param, hf_param)
        self._whole = ColumnParallelMapping(megatron_param, megatron_param)

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: Megatron) -> Tensor:
        """Returns this rank's rows of all projections."""
        merged = None
        if self.tp_rank == 0:
            sizes = _rows(self._get_config(megatron_module))
            joined = torch.cat([hf_weights[name] for name in _INPUTS])
            parts = torch.split(joined, sizes)
            by_rank = [part.reshape(self.tp_size, -1, part.shape[-1]) for part in parts]
            merged = torch.cat(by_rank, dim=1).flatten(0, 1)
        found: Tensor = self._whole.hf_to_megatron(merged, megatron_module)
        return found

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: Megatron
    ) -> dict[str, Tensor]:
        """Returns the four projections with the rows of all ranks."""
        here = None if megatron_module is None else _rows(self._get_config(megatron_module))
        # Ranks of other pipeline stages have no settings of this layer.
        sizes: list[int] = self.broadcast_obj_from_pp_rank(here)
        found = self._whole.megatron_to_hf(megatron_weights, megatron_module)
        if not found:
            return {}
        (merged,) = found.values()
        by_rank = merged.reshape(self.tp_size, -1, merged.shape[-1])
        parts = torch.split(by_rank, [size // self.tp_size for size in sizes], dim=1)
        query, key, value, *others = (part.flatten(0, 1) for part in parts)
        joined = (torch.cat([query, key, value]), *others)
        return {self.hf_param[name]: part for name, part in zip(_INPUTS, joined, strict=True)}


def _rows(config: Megatron) -> list[int]:
    """Returns the rows of queries, keys, values, gates, betas and alphas on all ranks."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    return [keys, keys, values, values, heads, heads]


class _Layers(FamilyBridge):
    """The layers of a Qwen3.5: those of Qwen3-Next, with other projections and gated MLPs.

    Source: arXiv:2412.06464 for the delta net, transformers for the rest.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        set_delta_nets(provider, settings)

    def _mappings(self) -> list[Megatron]:
        return [*ends(), *norms_before(), *self.attention(), *self.feed_forward()]

    def attention(self) -> list[Megatron]:
        """Returns the mappings of attention and delta nets."""
        names = {name: f"{DELTA_NET}in_proj_{name}.weight" for name in _INPUTS}
        return [*delta_nets(), _Inputs(f"{ATTENTION}in_proj.weight", names)]

    def feed_forward(self) -> list[Megatron]:
        """Returns the mappings of the matrices behind attention."""
        return gated(f"{DECODER}mlp.", f"{LAYER}mlp.")


class _MixtureLayers(_Layers):
    """The layers of a Qwen3.5 with experts, one of which every token goes to."""

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        set_shared_expert(provider, settings)

    def feed_forward(self) -> list[Megatron]:
        """Returns the mappings of the matrices behind attention."""
        return [*experts(), *shared_expert()]


@MegatronModelBridge.register_bridge(
    source=Qwen3_5ForCausalLM, target=GPTModel, model_type="qwen3_5_text"
)
class Qwen35Bridge(_Layers):
    """Qwen3.5, its language model alone."""


@MegatronModelBridge.register_bridge(
    source=Qwen3_5MoeForCausalLM, target=GPTModel, model_type="qwen3_5_moe_text"
)
class Qwen35MixtureBridge(_MixtureLayers):
    """Qwen3.5 with experts, its language model alone; the files have each expert apart."""


@MegatronModelBridge.register_bridge(
    source=Qwen3_5ForConditionalGeneration, target=GPTModel, model_type="qwen3_5"
)
class Qwen35VisionBridge(_Layers, VisionBridge):
    """Qwen3.5: a tower like Qwen3-VL's, without deeper features."""

    tower = Qwen3_5VisionModel
    tower_folder = "model.visual."
    decoder_folder = "model.language_model."


@MegatronModelBridge.register_bridge(
    source=Qwen3_5MoeForConditionalGeneration, target=GPTModel, model_type="qwen3_5_moe"
)
class Qwen35VisionMixtureBridge(FusedExperts, _MixtureLayers, VisionBridge):
    """Qwen3.5 with experts, which lie together in the files as Megatron has them."""

    is_turned = False
    tower = Qwen3_5MoeVisionModel
    tower_folder = "model.visual."
    decoder_folder = "model.language_model."

    def feed_forward(self) -> list[Megatron]:
        """Returns the mappings of the matrices behind attention."""
        return [*fused_experts(is_turned=False), *shared_expert()]
