"""Which steps an engine captures, and its memory beside new weights."""

import json
from pathlib import Path

import pytest
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.extensions.drafts.settings import DraftsSection
from slipstream.rollout_server.engine_rules import (
    PROMPT_TOKENS,
    graph_sizes,
    graph_values,
    vllm_share,
    wire_bytes,
)
from support.fakes.small_configs import small_config


def values(passed=None, *, on_cpu=False, **settings):
    section = RolloutServerSection.model_validate({"max_episodes": 512, **settings})
    return graph_values(section, passed or {}, on_cpu=on_cpu)


@pytest.mark.parametrize("max_episodes", [1, 16, 200, 500, 512, 1024, 4096])
def test_steps_of_replies_alone_and_beside_prompts_are_captured(
    max_episodes: int,
) -> None:
    sizes = graph_sizes(max_episodes)
    assert sizes == sorted(set(sizes))
    assert max_episodes in sizes
    assert max(sizes) == max_episodes + PROMPT_TOKENS
    # The sizes that are captured of vLLM's own choice.
    vllms = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert [size for size in sizes if size <= 512 and size != max_episodes] == [
        size for size in vllms if size != max_episodes
    ]


@pytest.mark.parametrize("max_episodes", [16, 512])
def test_padding_is_an_eighth_at_most_behind_the_sizes_of_vllm(
    max_episodes: int,
) -> None:
    sizes = [size for size in graph_sizes(max_episodes) if size >= 512]
    assert all(
        larger <= size * 9 / 8 for size, larger in zip(sizes, sizes[1:], strict=False)
    )


def test_sizes_are_told_where_there_are_graphs() -> None:
    assert values() == {"cudagraph_capture_sizes": graph_sizes(512)}
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


GB = 10**9


def config_of(folder, turns="auto", share=0.9, max_images=0):
    return small_config(
        model={"path": str(folder), "dtype": "bfloat16"},
        sampling={
            "max_reply_tokens": 8,
            "max_episode_tokens": 64,
            "max_images": max_images,
        },
        rollout_server={"gpu_memory_utilization": share},
        controller={"turns": turns},
        learner={"offload": {"gradients": True, "optimizer": True}},
    )


@pytest.mark.parametrize(
    ("turns", "share", "wire", "left"),
    [
        # 8B on an H200 and on a GPU of 80 GB, and 0.6B.
        ("auto", 0.9, 16.4, 0.9 - 16.4 / 150),
        ("auto", 0.9, 23, 0.9),
        ("auto", 0.9, 1.2, 0.9 - 1.2 / 150),
        ("sleep", 0.9, 1.2, 0.9),
        # The share of the engine counts, and not the GPU.
        ("auto", 0.33, 16.4, 0.33),
    ],
)
def test_vllm_gets_what_arriving_weights_leave(tmp_path, turns, share, wire, left):
    config = config_of(tmp_path, turns, share)
    assert vllm_share(config, int(wire * GB), 150 * GB) == pytest.approx(left)


def write_tensors(folder: Path, **shapes: list[int]) -> None:
    for name, shape in shapes.items():
        header = {
            "__metadata__": {"format": "pt"},
            name: {"dtype": "F32", "shape": shape},
        }
        text = json.dumps(header).encode()
        path = folder / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_bytes_on_the_wire_are_those_of_all_files_that_the_index_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, a=[3, 4], b=[3])
    assert wire_bytes(config_of(tmp_path)) == 2 * 15
    index = {"weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert wire_bytes(config_of(tmp_path)) == 2 * 12


def test_a_layer_that_drafts_is_on_the_wire(tmp_path: Path) -> None:
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4,
        "num_attention_heads": 2,
        "head_dim": 2,
        "intermediate_size": 8,
        "vocab_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    write_tensors(tmp_path, **{"model.norm.weight": [4]})
    before = wire_bytes(config_of(tmp_path))
    config = config_of(tmp_path)
    drafting = config.model_copy(update={"drafts": DraftsSection()})
    # A matrix over two states, four of attention, three of the MLP.
    assert wire_bytes(drafting) == before + 2 * (4 * 8 + 4 * 4 * 4 + 3 * 4 * 8)


def test_a_layer_that_predicts_further_tokens_is_not_on_the_wire(
    tmp_path: Path,
) -> None:
    values = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    write_tensors(tmp_path, **{"model.norm.weight": [3], "mtp.norm.weight": [7]})
    assert wire_bytes(config_of(tmp_path)) == 2 * 3
