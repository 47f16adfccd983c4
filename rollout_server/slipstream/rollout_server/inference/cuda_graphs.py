"""The sizes of an engine's steps that are captured as CUDA graphs.

vLLM captures steps by their number of tokens, by default up to 512. With 512 running replies a step
with a prompt has more tokens. The engine's thread then starts each kernel of that step, which
limits a small model.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.inference.prompt_gathering import MOST_STEPS

# Number of prompt tokens, besides the replies, in the largest captured step. A larger step keeps a
# GPU busy for about as long as it takes to start its kernels.
PROMPT_TOKENS = 4096
# (distance between two sizes, number of tokens up to which it holds). Steps are padded to the next
# size. The sizes up to 512 are vLLM's own.
_STRIDES = ((8, 256), (16, 512), (64, 1024), (128, 2048), (256, 1 << 20))
_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def graph_values(
    section: RolloutServerSection,
    passed: Mapping[str, object],
    *,
    wait_steps: int | None,
    on_cpu: bool,
) -> dict[str, object]:
    """Returns vLLM's arguments for graphs and prompt waits.

    Prompts wait `wait_steps` steps; None: the default of the device. Graph sizes are left out if
    `passed`, the user's own arguments of vLLM, names any.
    """
    has_graphs = section.has_graphs(on_cpu=on_cpu)
    default = MOST_STEPS if has_graphs else 0
    most_steps = default if wait_steps is None else wait_steps
    values: dict[str, object] = {"prefill_schedule_interval": most_steps + 1}
    compilation = passed.get("compilation_config")
    chosen = {*passed, *(compilation if isinstance(compilation, dict) else ())}
    if has_graphs and chosen.isdisjoint(_SIZES):
        values["cudagraph_capture_sizes"] = graph_sizes(section.max_episodes)
    return values


def graph_sizes(max_episodes: int) -> list[int]:
    """Sizes, in tokens, of the captured steps: for decoding, up to `PROMPT_TOKENS` more."""
    largest = max_episodes + PROMPT_TOKENS
    sizes, start = {1, 2, 4, max_episodes, largest}, 8
    for stride, end in _STRIDES:
        sizes.update(range(start, min(end, largest), stride))
        start = end
    return sorted(sizes)
