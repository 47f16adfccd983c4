"""Rules of a run whose engines compute on CPUs, where vLLM lacks some of its kernels."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config


def cpu_engine_problems(config: Config) -> Iterator[str]:
    """Yields one line for each setting that vLLM cannot do on a CPU; it reads config.json."""
    server, dtype = config.rollout_server, config.model.dtype
    sizes = read_model_sizes(config.model.path)
    if server.quantization == "fp8_per_tensor":
        yield (
            f"rollout_server.quantization = {server.quantization!r} needs a GPU; a CPU can compute "
            "with 'fp8_per_channel'"
        )
    elif sizes.experts and server.quantization != "off":
        yield (
            "rollout_server.quantization must be off for a mixture of experts on a CPU: vLLM has "
            f"no kernel there that quantises experts, got {server.quantization!r}"
        )
    # vLLM's delta nets fail there at the first request in any other type.
    if sizes.linear_heads and not sizes.has_mamba and dtype != "bfloat16":
        yield (
            'model.dtype must be "bfloat16" for a model with delta nets whose rollout servers run '
            f"on a CPU: vLLM computes them in no other type there, got {dtype!r}"
        )
    # vLLM's scan does not return the states in the middle of a prompt, which prefixes need.
    if sizes.has_mamba and server.enable_prefix_caching:
        yield (
            "rollout_server.enable_prefix_caching must be false for a model with Mamba layers on "
            "a CPU: vLLM keeps no states of their prefixes there, got true"
        )
    # With adapters, on whatever matrices, vLLM (0.32.0) computes experts by that kernel.
    if sizes.experts and config.lora.publishes_adapters:
        yield (
            "lora.publish must be merged for a mixture of experts on a CPU: vLLM's kernel for "
            "experts beside adapters needs a GPU"
        )
