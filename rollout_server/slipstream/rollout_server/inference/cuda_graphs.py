"""Which steps of an engine are CUDA graphs.

vLLM captures a step by its number of tokens, and those of up to 512. With 512 replies under way a
step with a prompt has more: each of its kernels is started by the engine's thread, which then
limits a small model.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.protocol.settings.sections import RolloutServerSection
from slipstream.rollout_server.inference.prompt_gathering import MOST_STEPS

# Tokens of prompts beside the replies in the largest captured step. A step of more keeps a GPU busy
# for about as long as it takes to start its kernels.
PROMPT_TOKENS = 4096
# The distance of two sizes, up to so many tokens; the tokens between them are padding. Those up to
# 512 are vLLM's.
_STRIDES = ((8, 256), (16, 512), (64, 1024), (128, 2048), (256, 1 << 20))
_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def graph_values(
    section: RolloutServerSection, passed: Mapping[str, object], *, on_cpu: bool
) -> dict[str, object]:
    """What vLLM is told of its graphs; `passed`, the user's own arguments of vLLM, come first."""
    has_graphs = section.has_graphs(on_cpu=on_cpu)
    default = MOST_STEPS if has_graphs else 0
    most_steps = default if section.prompt_wait_steps is None else section.prompt_wait_steps
    values: dict[str, object] = {"prefill_schedule_interval": most_steps + 1}
    compilation = passed.get("compilation_config")
    chosen = {*passed, *(compilation if isinstance(compilation, dict) else ())}
    if has_graphs and chosen.isdisjoint(_SIZES):
        values["cudagraph_capture_sizes"] = graph_sizes(section.max_episodes)
    return values


def graph_sizes(max_episodes: int) -> list[int]:
    """Sizes of the steps that are captured: decoding alone, and beside `PROMPT_TOKENS`."""
    largest = max_episodes + PROMPT_TOKENS
    sizes, start = {1, 2, 4, max_episodes, largest}, 8
    for stride, end in _STRIDES:
        sizes.update(range(start, min(end, largest), stride))
        start = end
    return sorted(sizes)
