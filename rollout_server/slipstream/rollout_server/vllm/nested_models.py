"""vLLM's Gemma 3 and Mistral 3, usable with or without torchvision.

vLLM's modules import transformers' image processors, which need torchvision. If torchvision is
missing, transformers' PIL modules replace them: pixels come from `slipstream.core.models.vision`.
"""

from slipstream.rollout_server.vllm.vision_models import ImagesAlone, stand_in_for_torchvision
from vllm.multimodal import MULTIMODAL_REGISTRY

stand_in_for_torchvision("gemma3", "Gemma3ImageProcessor")
stand_in_for_torchvision("pixtral", "PixtralImageProcessor")

from vllm.model_executor.models import mistral3  # noqa: E402
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402

__all__ = ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"]


class _Mistral3Info(ImagesAlone, mistral3.Mistral3ProcessingInfo):  # type: ignore[misc]
    pass


@MULTIMODAL_REGISTRY.register_processor(
    mistral3.Mistral3MultiModalProcessor,
    info=_Mistral3Info,
    dummy_inputs=mistral3.Mistral3DummyInputsBuilder,
)
class Mistral3ForConditionalGeneration(mistral3.Mistral3ForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Mistral 3, with images as its only input besides text."""
