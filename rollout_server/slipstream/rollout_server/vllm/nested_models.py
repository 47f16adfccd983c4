"""vLLM's Gemma 3 and Mistral 3, with or without torchvision.

vLLM's modules name transformers' image processors, which need torchvision. Where it is missing
transformers' PIL modules take their places: pixels come from `slipstream.core.models.vision`.
"""

import importlib
import importlib.util
import sys
from typing import Any

_PROCESSING = {"gemma3": "Gemma3ImageProcessor", "pixtral": "PixtralImageProcessor"}


def _stand_in_for_torchvision() -> None:
    """Puts transformers' PIL modules in the place of those that cannot be imported."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for family, name in _PROCESSING.items():
        folder = f"transformers.models.{family}.image_processing"
        module: Any = importlib.import_module(f"{folder}_pil_{family}")
        setattr(module, name, getattr(module, f"{name}Pil"))
        sys.modules[f"{folder}_{family}"] = module


_stand_in_for_torchvision()

from slipstream.rollout_server.vllm.vision_models import ImagesAlone  # noqa: E402
from vllm.model_executor.models import mistral3  # noqa: E402
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402

__all__ = ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"]


class _Mistral3Info(ImagesAlone, mistral3.Mistral3ProcessingInfo):  # type: ignore[misc]
    pass


@MULTIMODAL_REGISTRY.register_processor(
    mistral3.Mistral3MultiModalProcessor,
    info=_Mistral3Info,
    dummy_inputs=mistral3.Mistral3DummyInputsBuilder,
)
class Mistral3ForConditionalGeneration(mistral3.Mistral3ForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Mistral 3."""
