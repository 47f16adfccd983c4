"""vLLM's settings for a model with a vision tower, whose classes are registered here."""

from collections.abc import Mapping
from typing import Any

from slipstream.core.models.nested_decoders import is_nested
from slipstream.core.models.registry import FAMILIES, NESTED, family_of
from slipstream.core.settings.sampling_section import SamplingSection
from vllm import ModelRegistry

_PACKAGE = "slipstream.rollout_server.vllm"


def tower_values(table: Mapping[str, Any], sampling: SamplingSection) -> dict[str, object]:
    """Makes vLLM take our classes of models, and returns the settings of one with a vision tower.

    There are none for a model without a tower. That of `NESTED` is left out if no episode has
    images: it is not trained, so that no weights come for it.
    """
    modules = {name: family.engine.module for name, family in FAMILIES.items()}
    for name, module in {**modules, **dict.fromkeys(NESTED, "nested_models")}.items():
        # vLLM imports the module by its name, in processes of its own too.
        if module:
            ModelRegistry.register_model(name, f"{_PACKAGE}.{module}:{name}")
    if not table.get("vision_config"):
        return {}
    if family_of(table).engine.starts_cuda:
        from slipstream.rollout_server.vllm import vision_models

        vision_models.ask_images_of_qwen35()
    # Without any image vLLM would leave the tower out, and its weights could not be published.
    fewest = 0 if is_nested(table) else 1
    return {
        "limit_mm_per_prompt": {"image": max(fewest, sampling.max_images)},
        # It would make images with transformers' processors, whose video half needs torchvision.
        "skip_mm_profiling": True,
        # Pixels come as the trainer has them.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }
