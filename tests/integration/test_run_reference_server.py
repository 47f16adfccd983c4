"""A whole run whose reference is behind a real vLLM server."""

import statistics
import subprocess
import sys
from pathlib import Path

from slipstream.v1 import trainer_pb2
from support.rigs import run_processes
from support.rigs.teacher_server import NAME, teacher_server

pytestmark = run_processes.SLOW_RUN

STEPS = 25
TOP_K = 8


def make_teacher(folder: Path, *more: str) -> Path:
    """A model with other random weights than the student's."""
    make_model = [sys.executable, "-m", "slipstream.learner.trainer.tiny_model", folder]
    subprocess.run([*make_model, "--seed", "5", *more], check=True)
    return folder


def settings_with(url: str) -> dict[str, object]:
    server = {"base_url": url, "model": NAME}
    return {
        "run__steps": STEPS,
        "algorithm__advantage": "none",
        "algorithm__kl": {"coefficient": 1.0, "estimator": "forward_top_k"},
        "reference": {"server": server, "top_k": TOP_K},
    }


def test_a_student_comes_near_to_a_teacher_behind_a_server_and_is_trained_again_bit_for_bit(
    tmp_path: Path, tiny_model: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    with teacher_server(teacher, tmp_path / "log", more=["--dtype", "float32"]) as url:
        run_processes.write_config(tmp_path, tiny_model, **settings_with(url))
        run_processes.succeed("run", "config.toml", cwd=tmp_path, limit_s=500)
    run = tmp_path / "run"
    run_processes.checked(run)
    losses = [row["loss"] for row in run_processes.rows_of(run) if "step" in row]
    assert statistics.mean(losses[-5:]) < 0.5 * losses[0]
    divergence = [
        row["kl_reference"] for row in run_processes.rows_of(run) if "step" in row
    ]
    assert statistics.mean(divergence[-5:]) < 0.5 * divergence[0]
    batches = sorted((run / "journal" / "batches").glob("*.pb"))
    recorded = trainer_pb2.RecordedBatch.FromString(batches[0].read_bytes())
    assert {trajectory.reference.top_k for trajectory in recorded.trajectories} == {
        TOP_K
    }
    # The server is gone: the journal has what it said.
    run_processes.check_replay(run)
