"""Recipes for Gemma 3 and Mistral 3 with a vision tower, whose decoder is a text class' own.

Without images in episodes the decoder alone is trained: the tower stays as it is in the folder.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.core.models.nested_decoders import nested_name, tower_name
from slipstream.learner.trainer.families.families import Gemma3Bridge, MistralBridge
from slipstream.learner.trainer.families.mappings import FamilyBridge, renamed_files
from slipstream.learner.trainer.layers.pixtral_tower import PixtralTower
from slipstream.learner.trainer.layers.vision_tower import add_tower
from slipstream.learner.trainer.untyped import Megatron
from transformers import Gemma3ForConditionalGeneration, Mistral3ForConditionalGeneration


class _NestedBridge(FamilyBridge):
    """Places the tensors of a text recipe where the files have them; it stands before that class.

    Files have one of two forms of names: the published one, and that of transformers' modules.
    """

    # Names of the tensors in the folder.
    _held: Collection[str] = ()

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the decoder."""
        decoder = hf_pretrained.config.get_text_config()
        return super().provider_bridge(SimpleNamespace(config=decoder))

    def build_conversion_tasks(self, hf_pretrained: Megatron, chunks: list[Megatron]) -> Megatron:
        """Returns what Bridge loads and exports, by the folder's form of names."""
        self._held = hf_pretrained.state.source.get_all_keys()
        return super().build_conversion_tasks(hf_pretrained, chunks)

    def mapping_registry(self) -> Megatron:
        """Returns the map from Megatron's parameters to tensors of the files."""

        def placed(name: str) -> str:
            return nested_name(name, self._held)

        decoder = [renamed_files(each, placed) for each in self._mappings()]
        return MegatronMappingRegistry(*decoder, *self._others())

    def _others(self) -> list[Megatron]:
        """Returns the mappings of what is no decoder."""
        return []


@MegatronModelBridge.register_bridge(
    source=Gemma3ForConditionalGeneration, target=GPTModel, model_type="gemma3"
)
class Gemma3VisionBridge(_NestedBridge, Gemma3Bridge):
    """Gemma 3 of 4B and more: the text model beside a SigLIP tower.

    Source: arXiv:2503.19786, section 2.
    """


@MegatronModelBridge.register_bridge(
    source=Mistral3ForConditionalGeneration, target=GPTModel, model_type="mistral3"
)
class Mistral3VisionBridge(_NestedBridge, MistralBridge):
    """Mistral Small 3.1 and Ministral 3: a Mistral or Ministral 3 beside a Pixtral tower.

    Source: arXiv:2410.07073, section 2, for the tower.
    """

    def provider_bridge(self, hf_pretrained: Megatron) -> Megatron:
        """Returns Megatron's provider for the decoder, which makes the tower if it is trained."""
        provider, settings = super().provider_bridge(hf_pretrained), hf_pretrained.config
        if settings.vision_config is not None:
            add_tower(provider, lambda: PixtralTower(settings))
        return provider

    def _others(self) -> list[Megatron]:
        return [
            ReplicatedMapping(
                megatron_param=f"visual.inner.{part}.**",
                hf_param=tower_name(f"{part}.**", self._held),
            )
            for part in ("vision_tower", "multi_modal_projector")
        ]
