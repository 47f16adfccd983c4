"""How much of a GPU vLLM is given beside weights that arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.config_file import parse_config
from slipstream.rollout_server.inference.staging_memory import vllm_share, wire_bytes

GB = 10**9


def config_of(folder: Path, stage: object, share: float = 0.9, **weights: object) -> Config:
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "rollout_server": {"gpu_memory_utilization": share},
        "weights": {"stage_on_server": stage, **weights},
    }
    return parse_config(table, source="test")


@pytest.mark.parametrize(
    ("stage", "wire", "left"),
    [
        # 8B on an H200 and on a GPU of 80 GB, and 0.6B.
        ("auto", 16.4, 0.9 - 16.4 / 150),
        ("auto", 23, 0.9),
        ("auto", 1.2, 0.9 - 1.2 / 150),
        (False, 1.2, 0.9),
        (True, 60, 0.5),
    ],
)
def test_vllm_gets_what_arriving_weights_leave(
    tmp_path: Path, stage: object, wire: float, left: float
) -> None:
    config = config_of(tmp_path, stage)
    assert vllm_share(config, int(wire * GB), 150 * GB) == pytest.approx(left)


def test_auto_counts_the_share_of_the_engine_and_not_the_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "auto", share=0.33)
    assert vllm_share(config, int(16.4 * GB), 150 * GB) == 0.33


def test_weights_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"true takes 50.0 GB of the 45.0 GB of the engine"):
        vllm_share(config_of(tmp_path, True, share=0.3), 50 * GB, 150 * GB)


@pytest.mark.parametrize(("dtype", "expected"), [(None, 2 * 15), ("float32", 4 * 15)])
def test_bytes_on_the_wire_are_those_of_all_files(
    tmp_path: Path, dtype: str | None, expected: int
) -> None:
    for name, shape in (("a", [3, 4]), ("b", [3])):
        header = {"__metadata__": {"format": "pt"}, name: {"dtype": "F32", "shape": shape}}
        text = json.dumps(header).encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert wire_bytes(config_of(tmp_path, "auto", wire_dtype=dtype)) == expected
