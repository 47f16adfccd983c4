"""Text models of vLLM for folders that hold towers too; vLLM imports the classes by their names.

The towers take no memory, and a request with images is refused as for any text model.
"""

from collections.abc import Iterable

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """The decoder of a Kimi K2.5, which is a DeepSeek V3 in the folder `language_model`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "language_model.": "",
            # Names of adapters, by transformers' modules.
            "model.language_model.": "model.",
            "vision_tower.": None,
            "mm_projector.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Builds the decoder; `vllm_config` is of the whole model."""
        decoder = vllm_config.model_config.hf_config.text_config
        super().__init__(vllm_config=vllm_config.with_hf_config(decoder), prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the decoder's tensors, and leaves those of the tower out."""
        loaded: set[str] = super().load_weights(self.hf_to_vllm_mapper.apply(weights))
        return loaded
