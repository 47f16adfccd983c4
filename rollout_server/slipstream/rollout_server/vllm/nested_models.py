"""vLLM's Gemma 3 and Mistral 3, usable with or without torchvision.

vLLM's modules import transformers' image processors, which need torchvision. If torchvision is
missing, transformers' PIL modules replace them: pixels come from `slipstream.core.models.vision`.
"""

from slipstream.rollout_server.vllm.vision_models import stand_in_for_torchvision, with_images_alone

stand_in_for_torchvision("gemma3", "Gemma3ImageProcessor")
stand_in_for_torchvision("pixtral", "PixtralImageProcessor")

from vllm.model_executor.models import mistral3  # noqa: E402
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402

__all__ = ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"]


Mistral3ForConditionalGeneration = with_images_alone(
    mistral3.Mistral3ForConditionalGeneration,
    mistral3.Mistral3ProcessingInfo,
    mistral3.Mistral3MultiModalProcessor,
    mistral3.Mistral3DummyInputsBuilder,
)
