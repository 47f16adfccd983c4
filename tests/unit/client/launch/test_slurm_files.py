"""The files of deploy/slurm beside stand-ins for Slurm and for our command."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slipstream.client.cli import parse
from slipstream.core.configuration.config_file import load_config
from support.rigs.completed import completed
from support.rigs.waiting import LIMIT_S, wait_until

DEPLOY = Path(__file__).parents[4] / "deploy"
CONFIG = DEPLOY / "configs" / "quickstart.toml"
FILES = sorted((DEPLOY / "slurm").iterdir())
# squeue says what is in the file `jobs`, and fails without it; each call adds to `calls`.
SERVER_PROGRAMS = {
    "squeue": "echo >> calls; cat jobs",
    "slipstream": 'echo "$@" >> started; exec sleep 600',
}
pytestmark = pytest.mark.process


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_slurm_reads_all_its_settings_before_the_first_command(path: Path) -> None:
    head, _, body = path.read_text().partition("\n\n")
    assert "#SBATCH --requeue\n" in head
    assert re.search(r"^#SBATCH --mem=", head, re.MULTILINE)
    assert "#SBATCH" not in body
    completed(["bash", "-n", path], check=True)


@dataclass
class Site:
    """A folder with programs in place of Slurm's."""

    folder: Path

    def write(self, name: str, text: str) -> None:
        """Writes a file that a shell can run."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def start(self, script: str, **environ: str) -> subprocess.Popen[bytes]:
        """Starts a job of the quickstart."""
        settings = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_CPUS_PER_TASK": "2",
        }
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", script, "job", str(CONFIG), "run.steps=3"],
                cwd=self.folder,
                env=os.environ | settings | environ,
                stdout=log,
                stderr=log,
            )

    def point_to(self, listener: socket.socket) -> str:
        """Names a controller's address as the learner's job does."""
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (self.folder / "quick-controller.address").write_text(address)
        return address

    @property
    def said(self) -> str:
        """The job's log."""
        return (self.folder / "log").read_text()

    @property
    def started(self) -> str:
        """The arguments of all starts of our command."""
        path = self.folder / "started"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    for name, text in SERVER_PROGRAMS.items():
        site.write(name, f"#!/bin/sh\n{text}\n")
    return site


def rollout_job(site: Site, **environ: str) -> subprocess.Popen[bytes]:
    """Starts a rollout job that looks often."""
    script = (DEPLOY / "slurm" / "rollout-server.sbatch").read_text()
    script, count = re.subn(
        r"patience=3600 look=5 watch=60", "patience=3600 look=0.05 watch=0.05", script
    )
    assert count == 1
    name = {"SLURM_JOB_NAME": "quick-rollout-server", "SLURM_ARRAY_TASK_ID": "3"}
    return site.start(script, **name, **environ)


@pytest.fixture
def running(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """A rollout job whose server runs."""
    (site.folder / "jobs").write_text("1\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.point_to(listener)
        job = rollout_job(site)
        try:
            wait_until(lambda: site.started)
            yield job
        finally:
            job.terminate()
            job.wait()


def test_the_command_of_a_rollout_job_is_one_of_ours(site, running) -> None:
    arguments = parse(site.started.split())
    config = load_config(arguments.path, arguments.overrides)
    assert (config.run.name, config.run.steps) == ("quick", 3)
    assert (str(config.security.token_file), config.security.tls_key) == (
        "secrets/token",
        None,
    )
    assert arguments.server_id == "server-3"


def test_a_server_that_never_joined_ends_after_the_learners_job(site, running) -> None:
    (site.folder / "jobs").write_text("")
    assert running.wait(LIMIT_S) == 0
    assert "slipstream: the job quick-learner is gone, so this one ends" in site.said


def test_a_rollout_job_stays_while_slurm_does_not_answer(site, running) -> None:
    (site.folder / "jobs").unlink()
    calls = site.folder / "calls"
    size = calls.stat().st_size
    wait_until(lambda: calls.stat().st_size >= size + 3)
    assert running.poll() is None


def test_a_server_follows_the_learner_to_another_node(site, running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = site.point_to(listener)
        wait_until(lambda: f"--controller={address} " in site.started)
    assert running.poll() is None


def test_a_rollout_job_waits_for_a_learners_job_that_is_not_there_yet(
    site: Site,
) -> None:
    """Also where an earlier run of that name has left its address, and something answers there."""
    (site.folder / "jobs").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.point_to(listener)
        job = rollout_job(site)
        try:
            calls = site.folder / "calls"
            wait_until(calls.exists)
            size = calls.stat().st_size
            wait_until(lambda: calls.stat().st_size >= size + 3)
            assert (job.poll(), site.started) == (None, "")
            waits = "there is no job quick-learner yet: this one waits 3600 s for it"
            assert site.said == f"slipstream: {waits}\n"
            (site.folder / "jobs").write_text("1\n")
            wait_until(lambda: site.started)
        finally:
            job.terminate()
            job.wait()


def test_a_requeued_rollout_job_does_not_wait_for_a_run_that_is_over(
    site: Site,
) -> None:
    (site.folder / "jobs").write_text("")
    job = rollout_job(site, SLURM_RESTART_COUNT="1")
    assert (job.wait(LIMIT_S), site.started) == (0, "")
    assert "the job quick-learner is gone" in site.said


LEARNER_PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo n1; echo n2; else echo "$@" > requeued; fi',
    "srun": 'shift; SLURM_NODEID=1 "$@"',
    # %T: the job's state; %e: its end.
    "squeue": 'case "$*" in *%T*) echo RUNNING ;; *) cat end ;; esac',
}


def learner_job(
    site: Site, end: str, *, steps: int, code: int = 143
) -> subprocess.Popen[bytes]:
    """Starts a learner's job that makes so many steps, and ends with this code."""
    make = (
        f"mkdir -p runs/quick; for n in $(seq {steps}); do echo >> "
        f"runs/quick/metrics.jsonl; done"
    )
    ours = f'echo "$@" --node-rank "$NODE_RANK" > started; {make}; exit {code}'
    for name, text in (LEARNER_PROGRAMS | {"slipstream": ours}).items():
        site.write(name, f"#!/bin/bash\n{text}\n")
    (site.folder / "end").write_text(f"{end}\n")
    script = (DEPLOY / "slurm" / "learner.sbatch").read_text()
    return site.start(script, SLURM_JOB_NAME="quick-learner", SLURM_JOB_ID="7")


def test_the_command_of_a_learners_job_is_one_of_ours(site: Site) -> None:
    assert learner_job(site, "N/A", steps=0, code=0).wait(LIMIT_S) == 0
    arguments = parse(site.started.split())
    config = load_config(arguments.path, arguments.overrides)
    assert (config.run.name, config.run.steps) == ("quick", 3)
    assert config.controller.address == "n1:7070"
    assert (arguments.node_rank, arguments.master) == (1, "n1:29500")
    assert str(config.security.tls_key) == "secrets/server.key"
    assert (site.folder / "quick-controller.address").read_text() == "n1:7070\n"


@pytest.mark.parametrize(
    ("end", "steps"),
    [("2000-01-01T00:00:00", 1), ("2100-01-01T00:00:00", 0), ("N/A", 0)],
    ids=["a step was made", "somebody else told it to end", "no limit"],
)
def test_a_learners_job_that_is_told_to_end_comes_back(
    site: Site, end: str, steps: int
) -> None:
    job = learner_job(site, end, steps=steps)
    assert job.wait(LIMIT_S) == 143, site.said
    assert (site.folder / "requeued").read_text() == "requeue 7\n"


def test_a_learners_job_whose_limit_leaves_no_step_does_not(site: Site) -> None:
    (site.folder / "runs" / "quick").mkdir(parents=True)
    (site.folder / "runs" / "quick" / "metrics.jsonl").write_text("\n" * 20)
    job = learner_job(site, "2000-01-01T00:00:00", steps=0)
    assert job.wait(LIMIT_S) == 1
    words = "the time limit left no room for a step: Slurm tells this job to end 600 s"
    assert words in site.said
    assert not (site.folder / "requeued").exists()
