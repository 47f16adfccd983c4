"""vLLM's Qwen3.5, usable with or without torchvision; vLLM imports the classes from here by name.

Importing the model's kernels starts CUDA, so only the engine's processes import this module.
"""

# Stands in for torchvision.
from slipstream.rollout_server.vllm import vision_models  # noqa: F401
from vllm.model_executor.models.qwen3_5 import (  # noqa: F401
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
