"""The quickstart's task as a guest of Ray, by the program of deploy/ray.

Real daemons of Ray on this machine, and `ray job submit`. A node with a rollout server dies, then
the learner's; the same job, submitted again, finishes the run.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs import tools
from support.rigs.run_processes import check_finished

ROOT = Path(__file__).parents[2]
RIG = ROOT / "tests" / "support" / "rigs" / "ray_cluster.py"
PYTHON = tools.folder("ray") / "bin" / "python"
STEPS = 150
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="SLIPSTREAM_RAY must name a virtual environment with ray",
    ),
]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folder, after the run."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(tiny_model)
    (folder / "deploy").symlink_to(ROOT / "deploy")
    # The address by which Ray calls the nodes of this machine.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address = probe.getsockname()[0]
    make = [ROOT / "deploy" / "make_certificates.sh", folder / "secrets", address]
    subprocess.run(make, check=True, capture_output=True)
    environ = os.environ | {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "RAY_raylet_start_wait_time_s": "240",
        "TORCHDYNAMO_DISABLE": "1",
    }
    program = (ROOT / "deploy" / "ray" / "run.py").read_text()
    assert "NODES, SERVERS = 1, 1" in program
    program = program.replace("NODES, SERVERS = 1, 1", "NODES, SERVERS = 1, 2")
    (folder / "run.py").write_text(program)
    command = [
        str(PYTHON),
        str(RIG),
        "run.py",
        "deploy/configs/quickstart.toml",
        ".",
        "10",
    ]
    ended = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, check=False
    )
    message = "\n".join(
        path.read_text()[-4000:] for path in sorted(folder.glob("*.tail"))
    )
    assert ended.returncode == 0, f"{ended.stderr.decode()[-3000:]}\n{message}"
    return folder


def test_the_run_has_learned_and_trained_each_group_once(folder: Path) -> None:
    check_finished(folder / "runs/quickstart", steps=STEPS)


def test_a_server_of_a_dead_node_starts_again(folder: Path) -> None:
    joins = (folder / "first.log").read_text().count(" joins ")
    assert joins >= 3


def test_the_death_of_the_learners_node_is_told_with_what_to_do(folder: Path) -> None:
    lines = (folder / "first.log").read_text().splitlines()
    assert "a node of the learner has died: the same command resumes the run" in lines
    assert "the run resumes at version" in (folder / "second.log").read_text()


def test_the_log_of_all_instances_is_one(folder: Path) -> None:
    log = (folder / "second.log").read_text()
    assert "rollout server server-0 joins" in log
    assert "rollout server server-1 joins" in log
    assert re.search(rf"step +{STEPS}/{STEPS}", log)
