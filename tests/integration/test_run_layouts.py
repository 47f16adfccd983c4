"""Several trainer ranks in a real run: the weights that arrive are those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from run_processes import (  # noqa: E402
    check_ledger,
    copy_environments,
    make_model_folder,
    run_command,
    summary_of,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_survives"),
]

LAYOUTS = {
    "two replicas": {},
    "two replicas with a distributed optimizer": {"learner__use_distributed_optimizer": True},
    "tensor parallel": {"learner__parallel": {"tp": 2, "sequence_parallel": True}},
    "pipeline parallel": {"learner__parallel": {"pp": 2}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of two groups: two ranks can share it."""
    folder = tmp_path_factory.mktemp("models") / "four-heads"
    return make_model_folder(folder, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_and_publish_what_the_servers_prove(
    layout: str, tmp_path: Path, model: Path
) -> None:
    write_config(
        copy_environments(tmp_path),
        model,
        run__steps=3,
        evaluations=[],
        algorithm__group_size=8,
        algorithm__groups_per_step=8,
        learner__world_size=2,
        weights__verify_every=1,
        **LAYOUTS[layout],
    )
    result = run_command("run", "config.toml", cwd=tmp_path, limit_s=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 3
    assert summary["publishes_verified"] == summary["publishes"] >= 3
    assert summary["probe_gap_max"] <= 1e-4
    assert summary["logprob_gap_mean"] <= 1e-4
    check_ledger(summary)
    replay = run_command("replay", tmp_path / "run", limit_s=100)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert replay.stdout.count("as recorded") == 3
