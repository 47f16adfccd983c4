"""Models with images: a vision tower before the decoder of a text model, with packed sequences.

Megatron-Bridge's own models of Qwen2.5-VL and Qwen3-VL take no packed sequences, and one of them
needs TransformerEngine. Here the decoder is built like other families' decoders. transformers'
vision tower is on the first pipeline stage with the embedding, whole on every tensor parallel rank.
Hooks replace embeddings of image tokens by the tower's features, and rotate heads by image
positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from slipstream.core.errors import ConfigError
from slipstream.core.models.images import ImageProcessor
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.sequence_images import ImageInputs
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from slipstream.learner.trainer.families.mappings import (
    FamilyBridge,
    fused_experts,
    placed,
    recipe_for,
)
from slipstream.learner.trainer.layers.vision_tower import (
    Tower,
    frequency_axes,
    smallest_image,
)
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
    """A recipe for models with a vision tower, which subclasses set."""

    tower: Megatron
    # Folders of the tower and of the decoder in the files.
    tower_folder = "model.visual."
    decoder_folder = "model.language_model."

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the decoder, which also builds the tower."""
        settings = hf_pretrained.config
        provider = super().provider_bridge(SimpleNamespace(config=settings.text_config))
        provider.share_embeddings_and_output_weights = bool(settings.tie_word_embeddings)

        def with_tower(chunks: list[Megatron]) -> list[Megatron]:
            for chunk in chunks:
                if chunk.pre_process:
                    inner = self.tower._from_config(
                        settings.vision_config, attn_implementation="sdpa", dtype=torch.float32
                    )
                    embedding = next(chunk.embedding.parameters())
                    chunk.visual = Tower(inner).to(embedding.device, embedding.dtype)
            return chunks

        provider.register_pre_wrap_hook(with_tower)
        return provider

    def mapping_registry(self) -> Megatron:
        tower = ReplicatedMapping(
            megatron_param="visual.inner.**", hf_param=f"{self.tower_folder}**"
        )

        decoder = placed(
            self._mappings(), lambda name: name.replace("model.", self.decoder_folder, 1)
        )
        return MegatronMappingRegistry(*decoder, tower)


@recipe_for(Qwen2_5_VLForConditionalGeneration, "qwen2_5_vl")
class Qwen25VisionBridge(VisionBridge):
    """Qwen2.5-VL: a tower with windows before a Qwen2. Source: arXiv:2502.13923, section 2.1."""

    tower = Qwen2_5_VisionTransformerPretrainedModel
    tower_folder = "visual."
    decoder_folder = "model."

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.add_qkv_bias = True


@recipe_for(Qwen3VLForConditionalGeneration, "qwen3_vl")
class Qwen3VisionBridge(VisionBridge):
    """Qwen3-VL: first layers of a Qwen3 add DeepStack features. Source: arXiv:2511.21631, 2."""

    tower = Qwen3VLVisionModel

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.qk_layernorm = True


@recipe_for(Qwen3VLMoeForConditionalGeneration, "qwen3_vl_moe")
class Qwen3VisionMixtureBridge(Qwen3VisionBridge):
    """Qwen3-VL with experts, whose decoder is a Qwen3-MoE. Source: arXiv:2511.21631, section 2."""

    tower = Qwen3VLMoeVisionModel

    def _feed_forward(self) -> list[Megatron]:
        return fused_experts()


class Vision:
    """Hooks that let the chunks of a model compute micro batches with images.

    with vision.images_of(micro_batch):
        output = chunk(...)
    """

    def __init__(
        self, chunks: list[Megatron], hf_config: Megatron, processor: ImageProcessor
    ) -> None:
        """Registers hooks on unwrapped `chunks`; raises ConfigError if these cannot take images."""
        self.processor = processor
        rope = hf_config.text_config.rope_parameters
        self._axes = frequency_axes(rope["mrope_section"], rope.get("mrope_interleaved", False))
        self._smallest = smallest_image(hf_config)
        self._images: ImageInputs | None = None
        self._features: list[Tensor] = []
        # Number of the first decoder layers to whose outputs features are added.
        self.depth = depth = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", ()))
        for chunk in chunks:
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
                layer.register_forward_hook(partial(self._deeper, place + 1))

    @contextmanager
    def images_of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Makes forward passes inside the context use the images of `micro_batch`."""
        self._images = micro_batch.images
        try:
            yield
        finally:
            self._images = None
            self._features = []

    def _by_positions(self, rotary: Megatron, _arguments: object, angles: Tensor) -> Tensor | None:
        """Returns the rotary angles of each token by its image position; None without images."""
        if self._images is None:
            return None
        frequencies = rotary.inv_freq.float()
        axes = self._axes.to(frequencies.device)
        half = self._images.positions.float().index_select(1, axes) * frequencies
        return torch.cat((half, half), dim=-1)[:, None, None].to(angles.dtype)

    def _embedded(self, embedding: Megatron, _arguments: object, states: Tensor) -> Tensor:
        """Returns the embeddings; the tower's features replace the embeddings of image tokens.

        Without images, a tower that is trained computes the smallest image, with gradients of 0,
        because Megatron waits for the gradients of all parameters.
        """
        images = self._images
        if images is None:
            if self._is_trained and torch.is_grad_enabled():
                unused = self._chunk.visual(self._smallest.to(states.device))
                states = (
                    states + sum((features.sum() for features in unused), states.new_zeros(())) * 0
                )
            return states
        self._features = self._chunk.visual(images)
        is_image, placed = self._placed(self._features[0])
        return torch.where(is_image, placed.to(states.dtype), states)

    def _deeper(self, place: int, _layer: object, _arguments: object, output: Megatron) -> Megatron:
        if self._images is None:
            return output
        states, *rest = output
        _, placed = self._placed(self._features[place])
        return (states + placed.to(states.dtype), *rest)

    def _placed(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a mask of this rank's image tokens, and their features (0 for other tokens)."""
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
