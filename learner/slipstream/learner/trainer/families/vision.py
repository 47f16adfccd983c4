"""Models that see images: a vision tower before the decoder of a text model, packed sequences.

Megatron-Bridge's own models of Qwen2.5-VL and Qwen3-VL take no packed sequences, and one of them
needs TransformerEngine. Here the decoder is that of every other family. transformers' vision tower
stands beside the embedding on the first pipeline stage, whole on every tensor parallel rank.
Hooks put its features in the place of embeddings, and turn heads by the positions of images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from slipstream.core.errors import ConfigError
from slipstream.core.models.vision.pixels import ImageProcessor
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.families.fused_experts import FusedExperts, fused_experts
from slipstream.learner.trainer.families.mappings import (
    DECODER,
    LAYER,
    FamilyBridge,
    attention,
    ends,
    gated,
    norms_before,
    renamed_files,
)
from slipstream.learner.trainer.layers.vision_tower import (
    Tower,
    add_tower,
    frequency_axes,
    smallest_image,
)
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel


class VisionBridge(FamilyBridge):
    """What models with a vision tower share; the classes below have these three."""

    tower: Megatron
    # Folders of the tower and of the decoder in the files.
    tower_folder: str
    decoder_folder: str

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the decoder, which also makes the tower."""
        settings = hf_pretrained.config
        provider = super().provider_bridge(SimpleNamespace(config=settings.text_config))
        provider.share_embeddings_and_output_weights = bool(settings.tie_word_embeddings)

        def made() -> Tower:
            inner = self.tower._from_config(
                settings.vision_config, attn_implementation="sdpa", dtype=torch.float32
            )
            return Tower(inner)

        add_tower(provider, made)
        return provider

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""
        whole = ReplicatedMapping(
            megatron_param="visual.inner.**", hf_param=f"{self.tower_folder}**"
        )
        decoder = [*ends(), *norms_before(), *self.attention(), *self.feed_forward()]
        return MegatronMappingRegistry(*(self._placed(each) for each in decoder), whole)

    def attention(self) -> list[Megatron]:
        """Returns the mappings of the matrices of attention."""
        raise NotImplementedError

    def feed_forward(self) -> list[Megatron]:
        """Returns the mappings of the matrices behind attention."""
        return gated(f"{DECODER}mlp.", f"{LAYER}mlp.")

    def _placed(self, mapping: Megatron) -> Megatron:
        """Returns a mapping of the decoder with the names of this family's files."""
        return renamed_files(mapping, lambda name: name.replace("model.", self.decoder_folder, 1))


@MegatronModelBridge.register_bridge(
    source=Qwen2_5_VLForConditionalGeneration, target=GPTModel, model_type="qwen2_5_vl"
)
class Qwen25VisionBridge(VisionBridge):
    """Qwen2.5-VL: a tower with windows before a Qwen2.

    Source: arXiv:2502.13923, section 2.1.
    """

    tower = Qwen2_5_VisionTransformerPretrainedModel
    tower_folder = "visual."
    decoder_folder = "model."

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.add_qkv_bias = True

    def attention(self) -> list[Megatron]:
        """Returns the mappings of the matrices of attention."""
        return attention(biases=True)


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration, target=GPTModel, model_type="qwen3_vl"
)
class Qwen3VisionBridge(VisionBridge):
    """Qwen3-VL: a tower whose deeper features are added behind the first layers of a Qwen3.

    Source: arXiv:2511.21631, section 2.
    """

    tower = Qwen3VLVisionModel
    tower_folder = "model.visual."
    decoder_folder = "model.language_model."

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        super()._adjust(provider, settings)
        provider.qk_layernorm = True

    def attention(self) -> list[Megatron]:
        """Returns the mappings of the matrices of attention."""
        return attention(normed_heads=True)


@MegatronModelBridge.register_bridge(
    source=Qwen3VLMoeForConditionalGeneration, target=GPTModel, model_type="qwen3_vl_moe"
)
class Qwen3VisionMixtureBridge(FusedExperts, Qwen3VisionBridge):
    """Qwen3-VL with experts, whose decoder is a Qwen3-MoE.

    Source: arXiv:2511.21631, section 2.
    """

    tower = Qwen3VLMoeVisionModel

    def feed_forward(self) -> list[Megatron]:
        """Returns the mappings of the matrices behind attention."""
        return fused_experts()


class Vision:
    """Makes the chunks of a model take the images of micro batches.

    with vision.images_of(micro_batch):
        output = chunk(...)
    """

    def __init__(
        self, chunks: list[Megatron], hf_config: Megatron, processor: ImageProcessor
    ) -> None:
        """`chunks` are unwrapped; ConfigError for a layout in which they cannot take images."""
        self.processor = processor
        rope = hf_config.text_config.rope_parameters
        has_axes = "mrope_section" in rope
        if has_axes:
            self._axes = frequency_axes(rope["mrope_section"], rope.get("mrope_interleaved", False))
        self._smallest = smallest_image(hf_config)
        self._images: ImageInputs | None = None
        self._features: list[Tensor] = []
        depth = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", ()))
        for chunk in chunks:
            if has_axes:
                chunk.rotary_pos_emb.register_forward_hook(self._by_positions)
            if not chunk.pre_process:
                continue
            if len(chunk.decoder.layers) < depth:
                raise ConfigError(
                    f"learner.parallel: the first pipeline stage must hold the {depth} layers "
                    f"behind which a {hf_config.model_type} adds features of images, it has "
                    f"{len(chunk.decoder.layers)}"
                )
            self._chunk = chunk
            self._is_trained = any(p.requires_grad for p in chunk.visual.parameters())
            chunk.embedding.register_forward_hook(self._embedded)
            for place, layer in enumerate(chunk.decoder.layers[:depth]):
                layer.register_forward_hook(self._deeper(place + 1))

    @contextmanager
    def images_of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Gives the forward pass within the images of `micro_batch`."""
        self._images = micro_batch.images
        try:
            yield
        finally:
            self._images, self._features = None, []

    def _by_positions(self, rotary: Megatron, _arguments: object, angles: Tensor) -> Tensor | None:
        """Returns the angles of each token in place of those of each position."""
        if self._images is None:
            return None
        frequencies = rotary.inv_freq.float()
        axes = self._axes.to(frequencies.device)
        half = self._images.positions.float().index_select(1, axes) * frequencies
        return torch.cat((half, half), dim=-1)[:, None, None].to(angles.dtype)

    def _embedded(self, embedding: Megatron, _arguments: object, states: Tensor) -> Tensor:
        """Puts features in the place of the embeddings of images' tokens.

        Without images a tower that is trained sees one without effect: Megatron waits for the
        gradients of all parameters.
        """
        images = self._images
        if images is None:
            if self._is_trained and torch.is_grad_enabled():
                unused = self._chunk.visual(self._smallest.to(states.device))
                states = states + sum((one.sum() for one in unused), states.new_zeros(())) * 0
            return states
        self._features = self._chunk.visual(images)
        is_image, placed = self._placed(self._features[0])
        return torch.where(is_image, placed.to(states.dtype), states)

    def _deeper(self, place: int) -> Any:  # noqa: ANN401
        def added(_layer: object, _arguments: object, output: Megatron) -> Megatron:
            if self._images is None:
                return output
            states, *others = output
            _, placed = self._placed(self._features[place])
            return (states + placed.to(states.dtype), *others)

        return added

    def _placed(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which tokens of this rank are of images, and their features; 0 elsewhere."""
        assert self._images is not None
        rows = self._images.rows
        is_image = (rows >= 0)[:, None, None]
        placed = features.index_select(0, rows.clamp(min=0))[:, None] * is_image
        config = self._chunk.config
        if config.sequence_parallel:
            group = self._chunk.pg_collection.tp
            placed = scatter_to_sequence_parallel_region(placed, group=group)
            is_image = is_image.chunk(group.size())[group.rank()]
        return is_image, placed
