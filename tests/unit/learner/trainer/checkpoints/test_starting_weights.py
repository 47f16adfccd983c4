"""Files that a run cannot start from."""

import json
from pathlib import Path

import pytest
from support.fakes.small_configs import small_config

torch = pytest.importorskip("torch")

from slipstream.core.errors import CheckpointError, ConfigError  # noqa: E402
from slipstream.core.settings.config import Config  # noqa: E402
from slipstream.learner.trainer.checkpoints.stored_model import (  # noqa: E402
    check_nothing_lost,
    check_saved,
)
from support.fakes.small_checkpoints import save_checkpoint  # noqa: E402
from support.ranks.thread_ranks import ThreadRanks, run_ranks  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter, save  # noqa: E402

MATRIX = "decoder.layers.self_attention.linear_qkv.weight"
# The name that Megatron-Bridge gives the adapter beside that matrix.
ADAPTER = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"


def config_of(folder: Path) -> Config:
    lengths = {"max_reply_tokens": 8, "max_episode_tokens": 64}
    return small_config(model={"path": str(folder)}, sampling=lengths)


def write(folder: Path, *names: str) -> None:
    state = {name: torch.ones(2, 2) for name in names}
    with pytest.warns(UserWarning, match="save in a single process"):
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


TEXT = {"architectures": ["Qwen2ForCausalLM"]}
TOWER = "visual.inner.vision_tower.ln_pre.weight"
NO_TOWER = (
    "checkpoint.load must hold no vision tower for a Qwen2ForCausalLM, .*/with would be"
)


@pytest.mark.parametrize("folder", ["", "state"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (ADAPTER, "checkpoint.load must hold no adapters, .*/with would be"),
        (TOWER, NO_TOWER),
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path, folder, name, cause):
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    config = config_of(tmp_path)
    write(tmp_path / "without" / folder, MATRIX)
    check_nothing_lost(config, tmp_path / "without")
    write(tmp_path / "with" / folder, MATRIX, name)
    with pytest.raises(ConfigError, match=cause):
        check_nothing_lost(config, tmp_path / "with")


def flip(path: Path) -> None:
    (path / "tensors").write_bytes(b"weightz")


def without_manifest(path: Path) -> None:
    (path / "state").mkdir()
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (flip, "tensors: its bytes are not those that were written"),
        (
            lambda path: (path / "tensors").unlink(),
            "tensors: No such file or directory",
        ),
        (
            lambda path: (path / "manifest.json").write_text("{"),
            "manifest.json is damaged",
        ),
        (without_manifest, "manifest.json cannot be read: No such file or directory"),
    ],
    ids=["flipped", "missing", "manifest", "no manifest"],
)
def test_a_run_does_not_start_from_a_damaged_checkpoint(
    tmp_path: Path, spoil, cause: str
) -> None:
    path = save_checkpoint(tmp_path, 40)
    run_ranks(2, lambda ranks: check_saved(path, ranks), timeout_s=60.0)
    spoil(path)
    errors: list[Exception] = []

    def rank(ranks: ThreadRanks) -> None:
        with pytest.raises(CheckpointError) as caught:
            check_saved(path, ranks)
        errors.append(caught.value)

    run_ranks(2, rank, timeout_s=60.0)
    assert len(errors) == 2
    assert any(cause in str(error) and str(path) in str(error) for error in errors)
    assert not any("\n" in str(error) for error in errors)


def test_files_of_a_converter_have_no_manifest_and_pass(tmp_path: Path) -> None:
    write(tmp_path, MATRIX)
    run_ranks(1, lambda ranks: check_saved(tmp_path, ranks), timeout_s=60.0)
