"""The common parts of the recipes: names of tensors in files, and Megatron's settings.

"Bridge" is Megatron-Bridge, "the files" are those of the model's Hugging Face folder. Importing
this module imports Bridge's classes, so import it only after Bridge itself.
"""

from collections.abc import Callable, Mapping

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer import Megatron
from torch import Tensor

DECODER = "decoder.layers.*."
LAYER = "model.layers.*."
ATTENTION = f"{DECODER}self_attention."
EXPERTS = f"{DECODER}mlp.experts."
SHARED = f"{DECODER}mlp.shared_experts."


def renamed(pairs: Mapping[str, str]) -> list[Megatron]:
    """Returns mappings for tensors that differ by name; `pairs` leads from Megatron's names."""
    return [AutoMapping(megatron_param=ours, hf_param=theirs) for ours, theirs in pairs.items()]


def placed(mappings: list[Megatron], place: Callable[[str], str]) -> list[Megatron]:
    """Returns `mappings`, of which each name in the files is replaced by `place` of it."""
    for mapping in mappings:
        names = mapping.hf_param
        mapping.hf_param = (
            place(names)
            if isinstance(names, str)
            else {part: place(name) for part, name in names.items()}
        )
    return mappings


def ends() -> list[Megatron]:
    """Returns the mappings of embedding, final norm and output layer to tensors of the files."""
    return renamed(
        {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
        }
    )


def norms_before(*, mlp: str = "post_attention_layernorm") -> list[Megatron]:
    """Returns the mappings of norms before attention and MLP (`mlp`), fused by layers or not."""
    return renamed(
        {
            f"{DECODER}input_layernorm.weight": f"{LAYER}input_layernorm.weight",
            f"{ATTENTION}linear_qkv.layer_norm_weight": f"{LAYER}input_layernorm.weight",
            f"{DECODER}pre_mlp_layernorm.weight": f"{LAYER}{mlp}.weight",
            f"{DECODER}mlp.linear_fc1.layer_norm_weight": f"{LAYER}{mlp}.weight",
        }
    )


def attention() -> list[Megatron]:
    """Returns attention's mappings, with those of biases and norms, which some models lack."""
    pairs = {
        f"{ATTENTION}linear_proj.weight": f"{LAYER}self_attn.o_proj.weight",
        f"{ATTENTION}q_layernorm.weight": f"{LAYER}self_attn.q_norm.weight",
        f"{ATTENTION}k_layernorm.weight": f"{LAYER}self_attn.k_norm.weight",
    }
    joined = [
        QKVMapping(
            megatron_param=f"{ATTENTION}linear_qkv.{kind}",
            q=f"{LAYER}self_attn.q_proj.{kind}",
            k=f"{LAYER}self_attn.k_proj.{kind}",
            v=f"{LAYER}self_attn.v_proj.{kind}",
        )
        for kind in ("weight", "bias")
    ]
    return [*renamed(pairs), *joined]


def gated(ours: str = f"{DECODER}mlp.", theirs: str = f"{LAYER}mlp.") -> list[Megatron]:
    """Returns the mappings of a gated MLP, given by its prefixes in Megatron and in the files."""
    return [
        GatedMLPMapping(
            megatron_param=f"{ours}linear_fc1.weight",
            gate=f"{theirs}gate_proj.weight",
            up=f"{theirs}up_proj.weight",
        ),
        *renamed({f"{ours}linear_fc2.weight": f"{theirs}down_proj.weight"}),
    ]


def experts(
    mixture: str = "mlp.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Megatron]:
    """Returns mappings of router and experts; the files have `mixture` before their `names`."""
    folder = f"{LAYER}{mixture}experts.*."
    gate, up, down = (f"{folder}{name}.weight" for name in names)
    return [
        *renamed({f"{DECODER}mlp.router.weight": f"{LAYER}{mixture}gate.weight"}),
        GatedMLPMapping(megatron_param=f"{EXPERTS}linear_fc1.weight*", gate=gate, up=up),
        *renamed({f"{EXPERTS}linear_fc2.weight*": down}),
    ]


def shared_expert() -> list[Megatron]:
    """Returns the mappings of the shared expert, which every token uses, and of its gate."""
    gate = ReplicatedMapping(
        megatron_param=f"{SHARED}gate_weight", hf_param=f"{LAYER}mlp.shared_expert_gate.weight"
    )
    return [*gated(SHARED, f"{LAYER}mlp.shared_expert."), gate]


def recipe_for(source: type | str, model_type: str, provider: Megatron | None = None) -> Megatron:
    """Returns a decorator that registers a recipe with Bridge for transformers' class."""
    return MegatronModelBridge.register_bridge(
        source=source, target=GPTModel, provider=provider, model_type=model_type
    )


class FamilyBridge(MegatronModelBridge):  # type: ignore[misc]
    """The base of recipes: a decoder with RMSNorm, gated MLPs and rotary positions, without biases.

    Places and widths of norms, for which Megatron has no settings, are set by `place_norms`. The
    values of all models, recipes of Bridge's included, are set by `recipe.provider_of`.
    """

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the model of `hf_pretrained.config`."""
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.qk_layernorm = False
        self._adjust(provider, hf_pretrained.config)
        return provider

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""
        return MegatronMappingRegistry(*self._mappings())

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        """Adjusts Megatron's `provider` to the family; `settings` come from config.json."""

    def _mappings(self) -> list[Megatron]:
        """Returns the family's mappings; by default, its tensors are named like Llama's."""
        return [*ends(), *norms_before(), *self._attention(), *self._feed_forward()]

    def _attention(self) -> list[Megatron]:
        return attention()

    def _feed_forward(self) -> list[Megatron]:
        return gated()


def place_norms(provider: Megatron, place: str, *, whole: bool = False) -> None:
    """Sets where the layers of `provider` have norms; they are built by `spec.layer_spec`.

    `place` is "before" attention and MLP, "after" them, or "around" for both. With `whole`, one
    norm is over all queries of a token together and one over all keys; `qk_layernorm` stays off,
    since with it Megatron would sum the gradients of different heads over tensor parallel ranks.
    """
    from slipstream.learner.trainer.layers import spec

    provider.norm_place = place
    provider.has_whole_norms = whole
    provider.transformer_layer_spec = spec.layer_spec


def norms_after() -> list[Megatron]:
    """Returns the mappings of the norms after attention and MLP to tensors of the files."""
    return renamed(
        {
            f"{DECODER}self_attn_bda.norm.weight": f"{LAYER}post_attention_layernorm.weight",
            f"{DECODER}mlp_bda.norm.weight": f"{LAYER}post_feedforward_layernorm.weight",
        }
    )


def scale_embeddings(provider: Megatron, factor: float) -> None:
    """Makes the model multiply its embeddings by `factor`, rounded to the embeddings' type."""

    def scaled(_module: object, _arguments: object, states: Tensor) -> Tensor:
        return states * torch.tensor(factor, dtype=states.dtype, device=states.device)

    def hook(chunks: list[Megatron]) -> list[Megatron]:
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(scaled)
        return chunks

    provider.register_pre_wrap_hook(hook)


class _Turned:
    """A mixin for transposed matrices of experts: Bridge cannot tell whether a square one is."""

    def hf_to_megatron(self: Megatron, hf_weights: Tensor, megatron_module: Megatron) -> Tensor:
        """Returns this rank's part of the expert's matrix."""
        matrix: Tensor = super().hf_to_megatron(hf_weights.mT, megatron_module)  # type: ignore[misc]
        return matrix

    def megatron_to_hf(
        self: Megatron, megatron_weights: Tensor | None, megatron_module: Megatron
    ) -> dict[str, Tensor]:
        """Returns the matrix by its name in the files, stacked over expert parallel ranks."""
        matrices = super().megatron_to_hf(megatron_weights, megatron_module)  # type: ignore[misc]
        return {name: tensor.mT.contiguous() for name, tensor in matrices.items()}


class _TurnedExpert(_Turned, FusedExpertMapping):  # type: ignore[misc]
    pass


class _TurnedGatedExpert(_Turned, FusedGatedExpertMapping):  # type: ignore[misc]
    pass


def fused_experts(*, is_turned: bool = True) -> list[Megatron]:
    """Returns the mappings of router and experts, one tensor a layer, perhaps transposed."""
    folder = f"{LAYER}mlp.experts."
    gated = FusedGatedExpertMapping
    plain = FusedExpertMapping
    if is_turned:
        gated = _TurnedGatedExpert
        plain = _TurnedExpert
    return [
        *renamed({f"{DECODER}mlp.router.weight": f"{LAYER}mlp.gate.weight"}),
        gated(megatron_param=f"{EXPERTS}linear_fc1.weight*", hf_param=f"{folder}gate_up_proj"),
        plain(megatron_param=f"{EXPERTS}linear_fc2.weight*", hf_param=f"{folder}down_proj"),
    ]
