"""Which steps an engine captures as CUDA graphs, and how long its prompts wait."""

import pytest
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.engine_rules import PROMPT_TOKENS, graph_sizes, graph_values


def values(passed=None, *, on_cpu=False, **settings):
    section = RolloutServerSection.model_validate({"max_episodes": 512, **settings})
    return graph_values(section, passed or {}, on_cpu=on_cpu)


@pytest.mark.parametrize("max_episodes", [1, 16, 200, 500, 512, 1024, 4096])
def test_steps_of_replies_alone_and_beside_prompts_are_captured(max_episodes: int) -> None:
    sizes = graph_sizes(max_episodes)
    assert sizes == sorted(set(sizes))
    assert max_episodes in sizes
    assert max(sizes) == max_episodes + PROMPT_TOKENS
    # What is captured of vLLM's own choice.
    vllms = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert [size for size in sizes if size <= 512 and size != max_episodes] == [
        size for size in vllms if size != max_episodes
    ]


@pytest.mark.parametrize("max_episodes", [16, 512])
def test_padding_is_an_eighth_at_most_behind_the_sizes_of_vllm(max_episodes: int) -> None:
    sizes = [size for size in graph_sizes(max_episodes) if size >= 512]
    assert all(larger <= size * 9 / 8 for size, larger in zip(sizes, sizes[1:], strict=False))


def test_prompts_wait_where_there_are_graphs() -> None:
    assert values()["prefill_schedule_interval"] == 33
    assert values(enforce_eager=True) == {}
    assert values(on_cpu=True) == {}
    # torch.compile on a CPU makes no graphs.
    assert values(on_cpu=True, enforce_eager=False) == {}


@pytest.mark.parametrize(
    "passed",
    [
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 512},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
        {"compilation_config": {"max_cudagraph_capture_size": 8}},
    ],
)
def test_sizes_that_the_user_chose_are_left_alone(passed: dict[str, object]) -> None:
    assert "cudagraph_capture_sizes" not in values(passed)
    assert "cudagraph_capture_sizes" in values({"compilation_config": {"mode": 3}})
