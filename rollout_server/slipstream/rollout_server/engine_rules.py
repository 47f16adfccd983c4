"""Rules for an engine's memory and its steps; they keep steps inside captured CUDA graphs.

vLLM captures steps of up to 512 tokens by default. With 512 running replies a step with a prompt
has more tokens, so the engine's thread must start each of its kernels, which limits a small model.
`graph_values` therefore asks vLLM to capture larger steps.
"""

import math
from collections.abc import Mapping

from slipstream.core.extension import num_parameters_beside_model
from slipstream.core.models.model_files import loaded_tensors
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import RolloutServerSection

# Number of prompt tokens, in addition to the replies, in the largest captured step. A larger step
# keeps a GPU busy for about as long as it takes to start its kernels.
PROMPT_TOKENS = 4096
# (distance between two sizes, number of tokens up to which it holds). Steps are padded to the next
# size. The sizes up to 512 are vLLM's own.
_STRIDES = ((8, 256), (16, 512), (64, 1024), (128, 2048), (256, 1 << 20))
_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def graph_values(
    section: RolloutServerSection, passed: Mapping[str, object], *, on_cpu: bool
) -> dict[str, object]:
    """Returns vLLM's arguments for the sizes of CUDA graphs.

    Returns {} if the engine has no CUDA graphs, or if `passed`, the user's own arguments for vLLM,
    sets the sizes.
    """
    if on_cpu or section.is_eager(on_cpu=on_cpu):
        return {}
    compilation = passed.get("compilation_config")
    passed_names = {*passed, *(compilation if isinstance(compilation, dict) else ())}
    if not passed_names.isdisjoint(_SIZES):
        return {}
    return {"cudagraph_capture_sizes": graph_sizes(section.max_episodes)}


def graph_sizes(max_episodes: int) -> list[int]:
    """Returns the sizes, in tokens, of the steps to capture as CUDA graphs, ascending."""
    largest = max_episodes + PROMPT_TOKENS
    sizes = {1, 2, 4, max_episodes, largest}
    start = 8
    for stride, end in _STRIDES:
        sizes.update(range(start, min(end, largest), stride))
        start = end
    return sorted(sizes)


# Greatest part of the engine's share that is taken from the KV cache for arriving weights.
MOST_OF_SHARE = 1 / 6


def vllm_share(config: Config, wire_bytes: int, gpu_bytes: int) -> float:
    """Returns the fraction of a GPU's memory for vLLM: the engine's share minus a staged update.

    `wire_bytes` is the size of an update, all of which each worker of an engine receives;
    `gpu_bytes` is the GPU's memory. Nothing is subtracted if updates are not staged, or if the
    update is too large.
    """
    share = config.rollout_server.gpu_memory_utilization
    part = wire_bytes / gpu_bytes
    return share - part if config.may_stage and part <= MOST_OF_SHARE * share else share


def wire_bytes(config: Config) -> int:
    """Returns the size of all weights as they are sent, from the shapes in the model's files.

    Parameters that options publish beside them are counted too.
    """
    elements = sum(math.prod(shape) for _, shape in loaded_tensors(config))
    elements += num_parameters_beside_model(config)
    return (4 if config.model.dtype == "float32" else 2) * elements
