"""vLLM's vision models, with images as their only input besides text, even without torchvision.

vLLM computes pixels with transformers' processors, whose video half needs torchvision. In this
project requests carry pixels of `slipstream.core.models.images`, so that the trainer has the
same bits. vLLM imports this module by name wherever it inspects a model: see `tower_values`.
Importing this module must not start CUDA, since the server forks the engine.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from slipstream.core.models.families import FAMILIES
from slipstream.core.models.images import load_processor
from transformers import PretrainedConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

if importlib.util.find_spec("torchvision") is None:
    # vLLM's models import functions of the replaced module too, which both modules have.
    _FOLDER = "transformers.models.qwen2_vl.image_processing"
    _PIL: Any = importlib.import_module(f"{_FOLDER}_pil_qwen2_vl")
    _PIL.Qwen2VLImageProcessor = _PIL.Qwen2VLImageProcessorPil
    sys.modules[f"{_FOLDER}_qwen2_vl"] = _PIL

from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe  # noqa: E402


class ImagesAlone:
    """Tells vLLM that images are a model's only inputs besides text.

    It also reports the most tokens of one image.
    """

    ctx: Any

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns the modalities besides text, with the most inputs of each, None for no limit."""
        return {"image": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Returns the most tokens that one image can have."""
        processor = load_processor(self.ctx.model_config.model)
        return {"image": min(seq_len, processor.max_tokens)}


def with_images_alone(model: type, info: type, processor: type, dummies: type) -> Any:  # noqa: ANN401 - a class
    """Returns vLLM's class `model` with images as its only input besides text.

    The others are the classes with which vLLM registers the model's processor.
    """
    image_model = type(model.__name__, (model,), {})
    image_info = type(info.__name__, (ImagesAlone, info), {})
    register = MULTIMODAL_REGISTRY.register_processor(
        processor, info=image_info, dummy_inputs=dummies
    )
    return register(image_model)


class _Qwen35Info(qwen3_vl.Qwen3VLProcessingInfo):  # type: ignore[misc]
    def get_hf_config(self) -> PretrainedConfig:
        """Returns the model's configuration; Qwen3-VL's method accepts only its own class."""
        return self.ctx.get_hf_config()


_OF_QWEN3 = qwen3_vl.Qwen3VLMultiModalProcessor, qwen3_vl.Qwen3VLDummyInputsBuilder
# Describes a Qwen3.5's images to vLLM without importing the model class in `delta_models`.
Qwen35Images = with_images_alone(object, _Qwen35Info, *_OF_QWEN3)
Qwen3VLForConditionalGeneration = with_images_alone(
    qwen3_vl.Qwen3VLForConditionalGeneration, qwen3_vl.Qwen3VLProcessingInfo, *_OF_QWEN3
)
Qwen3VLMoeForConditionalGeneration = with_images_alone(
    qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,
    qwen3_vl_moe.Qwen3VLMoeProcessingInfo,
    *_OF_QWEN3,
)
Qwen2_5_VLForConditionalGeneration = with_images_alone(
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
    qwen2_5_vl.Qwen2_5_VLProcessingInfo,
    qwen2_5_vl.Qwen2_5_VLMultiModalProcessor,
    qwen2_vl.Qwen2VLDummyInputsBuilder,
)


@functools.cache
def ask_images_of_qwen35() -> None:
    """Makes vLLM ask `Qwen35Images`, so that the server does not import the model's own class.

    The module of that class starts CUDA when it is imported. vLLM would then start the engine as a
    new program, which lacks everything registered here and outlives a server that is killed.
    """
    of_model = MULTIMODAL_REGISTRY._get_model_cls

    def of_images(model_config: Any) -> Any:  # noqa: ANN401 - vLLM's
        family = FAMILIES.get(model_config.architecture)
        starts_cuda = family is not None and family.vision is not None and family.engine.starts_cuda
        return Qwen35Images if starts_cuda else of_model(model_config)

    MULTIMODAL_REGISTRY._get_model_cls = of_images
