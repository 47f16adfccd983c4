"""The GPU memory that vLLM leaves free, so that new weights can arrive beside those that serve."""

from __future__ import annotations

import math

from slipstream.core.errors import ConfigError
from slipstream.core.models.loaded_tensors import loaded_tensors
from slipstream.core.settings.config import Config

# Greatest part of the engine's share that "auto" takes from the KV cache for arriving weights.
MOST_OF_SHARE = 1 / 6


def vllm_share(config: Config, wire_bytes: int, gpu_bytes: int) -> float:
    """Returns the part of a GPU for vLLM: the engine's share, less what arriving weights take.

    `wire_bytes` arrive in an update; each worker of an engine receives all of them.
    """
    share = config.rollout_server.gpu_memory_utilization
    stage, part = config.staging, wire_bytes / gpu_bytes
    if not stage or (stage == "auto" and part > MOST_OF_SHARE * share):
        return share
    if part >= share:
        raise ConfigError(
            f"weights.stage_on_server = true takes {wire_bytes / 1e9:.1f} GB of the "
            f"{share * gpu_bytes / 1e9:.1f} GB of the engine: set 'auto' or false"
        )
    return share - part


def wire_bytes(config: Config) -> int:
    """Returns the bytes of all weights on the wire, by the headers of the model's files."""
    elements = sum(math.prod(shape) for _, shape in loaded_tensors(config))
    return (4 if config.model.dtype == "float32" else 2) * elements
