"""How much of a GPU vLLM is given beside weights that arrive."""

import json
from pathlib import Path

import pytest
from slipstream.rollout_server.engine_rules import vllm_share, wire_bytes
from support.fakes.small_configs import small_config

GB = 10**9


def config_of(folder, turns="auto", share=0.9, max_images=0):
    return small_config(
        model={"path": str(folder), "dtype": "bfloat16"},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": 64, "max_images": max_images},
        rollout_server={"gpu_memory_utilization": share},
        controller={"turns": turns},
        learner={"offload": {"gradients": True, "optimizer": True}},
    )


@pytest.mark.parametrize(
    ("turns", "wire", "left"),
    [
        # 8B on an H200 and on a GPU of 80 GB, and 0.6B.
        ("auto", 16.4, 0.9 - 16.4 / 150),
        ("auto", 23, 0.9),
        ("auto", 1.2, 0.9 - 1.2 / 150),
        ("sleep", 1.2, 0.9),
    ],
)
def test_vllm_gets_what_arriving_weights_leave(tmp_path, turns, wire, left):
    config = config_of(tmp_path, turns)
    assert vllm_share(config, int(wire * GB), 150 * GB) == pytest.approx(left)


def test_the_share_of_the_engine_counts_and_not_the_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, share=0.33)
    assert vllm_share(config, int(16.4 * GB), 150 * GB) == 0.33


def write_tensors(folder: Path, **shapes: list[int]) -> None:
    for name, shape in shapes.items():
        header = {"__metadata__": {"format": "pt"}, name: {"dtype": "F32", "shape": shape}}
        text = json.dumps(header).encode()
        path = folder / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_bytes_on_the_wire_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, a=[3, 4], b=[3])
    assert wire_bytes(config_of(tmp_path)) == 2 * 15


def test_a_file_that_the_index_does_not_name_is_not_on_the_wire(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path, a=[3, 4], stale=[30])
    index = {"weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert wire_bytes(config_of(tmp_path)) == 2 * 12


@pytest.mark.parametrize(
    ("family", "images", "expected"),
    [("Gemma3", 0, 3), ("Mistral3", 0, 3), ("Mistral3", 1, 3 + 12 + 5)],
)
def test_a_tower_that_is_left_out_is_not_on_the_wire(tmp_path, family, images, expected):
    decoder = {"hidden_size": 4, "num_hidden_layers": 1}
    values = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "text_config": decoder,
        "vision_config": {"hidden_size": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {
        "language_model.model.norm.weight": [3],
        "vision_tower.patch_conv.weight": [3, 4],
        "multi_modal_projector.norm.weight": [5],
        # A layer that predicts further tokens.
        "mtp.norm.weight": [7],
    }
    write_tensors(tmp_path, **tensors)
    config = config_of(tmp_path, max_images=images)
    assert wire_bytes(config) == 2 * expected
