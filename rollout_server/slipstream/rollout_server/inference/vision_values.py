"""vLLM's settings for a model with vision, whose classes are ours."""

from __future__ import annotations

from slipstream.protocol.settings.rope_fields import VISION
from slipstream.protocol.settings.sampling_section import SamplingSection
from vllm import ModelRegistry

_MODELS = "slipstream.rollout_server.inference.vision_models"


def vision_values(sampling: SamplingSection) -> dict[str, object]:
    """Makes vLLM take our classes, and returns its settings for images whose pixels are ours."""
    for architecture in VISION:
        # vLLM imports the module by its name, in processes of its own too.
        ModelRegistry.register_model(architecture, f"{_MODELS}:{architecture}")
    return {
        # Without any image vLLM would leave the tower out, and its weights could not be published.
        "limit_mm_per_prompt": {"image": max(1, sampling.max_images)},
        # It would make images with transformers' processors, whose video half needs torchvision.
        "skip_mm_profiling": True,
        # Pixels come as the trainer has them.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }
