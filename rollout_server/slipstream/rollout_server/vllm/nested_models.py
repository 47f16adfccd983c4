"""vLLM's Gemma 3 and Mistral 3, usable with or without torchvision.

vLLM's modules import transformers' image processors, which need torchvision. If torchvision is
missing, transformers' PIL modules replace them; the towers are not loaded.
"""

from slipstream.rollout_server.vllm.vision_models import stand_in_for_torchvision

stand_in_for_torchvision("gemma3", "Gemma3ImageProcessor")
stand_in_for_torchvision("pixtral", "PixtralImageProcessor")

from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402
from vllm.model_executor.models.mistral3 import Mistral3ForConditionalGeneration  # noqa: E402

__all__ = ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"]
