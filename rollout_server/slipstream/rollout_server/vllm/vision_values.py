"""vLLM's settings for a model with a vision tower, whose classes are registered here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.models.nested_decoders import NESTED, is_nested
from slipstream.core.models.rope_fields import QWEN35, QWEN35_VISION, VISION, architecture_of
from slipstream.core.settings.sampling_section import SamplingSection
from vllm import ModelRegistry

_INFERENCE = "slipstream.rollout_server.inference"


def register_language_models() -> None:
    """Makes vLLM take the language models of Qwen3.5 with or without torchvision."""
    for architecture in QWEN35:
        ModelRegistry.register_model(architecture, f"{_INFERENCE}.delta_models:{architecture}")


def tower_values(table: Mapping[str, Any], sampling: SamplingSection) -> dict[str, object]:
    """Makes vLLM take our classes of a model with a vision tower, and returns its settings.

    There are none for a model without a tower. That of `NESTED` is left out if no episode has
    images: it is not trained, so that no weights come for it.
    """
    if not table.get("vision_config"):
        return {}
    for architecture in (*VISION, *NESTED):
        module = "nested_models" if architecture in NESTED else "vision_models"
        module = "delta_models" if architecture in QWEN35_VISION else module
        # vLLM imports the module by its name, in processes of its own too.
        ModelRegistry.register_model(architecture, f"{_INFERENCE}.{module}:{architecture}")
    if architecture_of(table) in QWEN35_VISION:
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
