"""The quickstart under Slurm from the files of deploy/slurm, without an edit.

Real daemons of Slurm on nodes made of namespaces. A rollout job is preempted, the node of one dies,
the learner's job is requeued, its node dies; the run goes on to its end.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.rigs import slurm_cluster
from support.rigs.namespaces import poll
from support.rigs.run_processes import check_finished
from support.rigs.slurm_cluster import SlurmCluster

MISSING = slurm_cluster.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

ROOT = Path(__file__).parents[2]
CONFIG = "deploy/configs/quickstart.toml"
# Enough that the run goes on while jobs wait in the queue, also on a faster machine.
STEPS = 500
RUN = "runs/quickstart"
SETTINGS = (CONFIG, f"run.steps={STEPS}")
LEARNER = ("--job-name=quickstart-learner", "deploy/slurm/learner.sbatch", *SETTINGS)
SERVERS = (
    "--job-name=quickstart-rollout-server",
    "deploy/slurm/rollout-server.sbatch",
    *SETTINGS,
)
LIMIT_S = 900.0


class Site:
    """The folder that all nodes share, and what the jobs have done."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "site"
        # Nodes of a rollout server before and after its node died, and the learner's likewise.
        self.nodes: list[str] = []
        self.learners: list[str] = []
        self.learner = ""

    def slurm(self, *command: str) -> str:
        """Calls a command of Slurm or of ours in this folder."""
        return self.cluster.call(*command, cwd=self.folder)

    def submit(self, *command: str) -> str:
        """Submits a job; returns its number."""
        return self.slurm("sbatch", "--parsable", *command).strip()

    def log(self, name: str) -> str:
        """The log of a job."""
        path = self.folder / f"quickstart-{name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def learner_log(self) -> str:
        """The log of the learner's job, of all its starts."""
        return self.log(f"learner-{self.learner}")

    def starts(self, job: str) -> int:
        """How often a rollout job has started its server."""
        return self.log(f"rollout-server-{job}").count(" joins ")

    @property
    def step(self) -> int:
        """The newest step that a learner's log shows."""
        matches = re.findall(rf"step +(\d+)/{STEPS}", self.learner_log)
        return int(matches[-1]) if matches else 0

    def wait_for(self, what: str, is_there: Callable[[], object]) -> None:
        """Waits for it; fails with all logs."""
        for _ in poll(LIMIT_S, every_s=0.5):
            if is_there():
                return
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )
        raise AssertionError(f"{what}\n{self.slurm('squeue')}\n{logs}")


def carry_out(site: Site) -> None:
    """The run with its three accidents."""
    cluster = site.cluster
    servers = site.submit("--partition=preemptible", "--array=0-1", *SERVERS)
    first, second = (f"{servers}_{task}" for task in (0, 1))
    waits = "there is no job quickstart-learner yet: this one waits 3600 s for it"
    site.wait_for(
        "a server waits", lambda: waits in site.log(f"rollout-server-{first}")
    )
    site.learner = learner = site.submit(*LEARNER)
    site.wait_for("both servers run", lambda: "RUNNING" in cluster.state(second))
    site.wait_for("the run makes steps", lambda: site.step >= 10)
    # A job of the other partition needs the node.
    node = f"--nodelist={cluster.node_of(second)}"
    site.submit(node, "--output=/dev/null", "--wrap=true")
    message = "rollout server server-1 has left"
    site.wait_for(
        "the preempted server drains",
        lambda: message in site.log(f"rollout-server-{second}"),
    )
    site.wait_for("the run goes on with the other", lambda: site.step >= 20)
    site.nodes.append(cluster.node_of(first))
    cluster.kill(site.nodes[0])
    site.wait_for("the preempted server starts again", lambda: site.starts(second) == 2)
    site.wait_for(
        "the dead node's server starts again", lambda: site.starts(first) == 2
    )
    site.nodes.append(cluster.node_of(first))
    before = site.step
    site.wait_for("the run goes on with both", lambda: site.step >= before + 5)
    site.slurm("scontrol", "requeue", learner)
    site.wait_for("the run stops", lambda: "stopped at version" in site.learner_log)
    cluster.start_node(site.nodes[0])
    before = site.step
    site.wait_for("the run goes on", lambda: site.step >= before + 5)
    site.learners.append(cluster.node_of(learner))
    cluster.kill(site.learners[0])
    site.wait_for("the node is dead", lambda: cluster.state(learner) == "PENDING")
    site.wait_for(
        "the learner starts elsewhere", lambda: cluster.state(learner) == "RUNNING"
    )
    site.learners.append(cluster.node_of(learner))
    site.wait_for(
        "the run is finished", lambda: not site.slurm("squeue", "--noheader").strip()
    )


@pytest.fixture(scope="module")
def site(tiny_model: Path) -> Iterator[Site]:
    # Short, because sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-slurm-"))
    environ = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    try:
        with SlurmCluster(folder / "c", nodes=4, environ=environ) as cluster:
            site = Site(cluster)
            (site.folder / "models").mkdir(parents=True)
            (site.folder / "models" / "tiny").symlink_to(tiny_model)
            (site.folder / "deploy").symlink_to(ROOT / "deploy")
            make = [ROOT / "deploy" / "make_certificates.sh", site.folder / "secrets"]
            subprocess.run([*make, *cluster.nodes], check=True, capture_output=True)
            carry_out(site)
            yield site
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_run_has_learned_and_trained_each_group_once(site: Site) -> None:
    check_finished(site.folder / RUN, steps=STEPS)


def test_what_ran_on_a_dead_node_runs_on_another(site: Site) -> None:
    for dead, later in (site.nodes, site.learners):
        assert later not in ("", dead)


def test_a_server_says_that_the_learners_job_is_gone(site: Site) -> None:
    gone = "the job quickstart-learner is gone, so this one ends"
    assert all(gone in site.log(f"rollout-server-1_{task}") for task in (0, 1))


def test_a_job_that_is_cancelled_does_not_come_back(site: Site) -> None:
    job = site.submit("--job-name=quickstart-learner", "--wrap=sleep 600")
    server = site.submit("--array=0-0", *SERVERS) + "_0"
    site.wait_for(
        "the rollout job waits", lambda: site.cluster.state(server) == "RUNNING"
    )
    site.slurm("scancel", server, job)
    site.wait_for(
        "both jobs end", lambda: not site.slurm("squeue", "--noheader").strip()
    )
    assert {site.cluster.state(job_id) for job_id in (server, job)} == {"CANCELLED"}


def test_a_learner_whose_time_limit_leaves_no_step_fails_with_a_line(
    site: Site,
) -> None:
    """Slurm tells it to end ten minutes before its limit, which is at once."""
    (site.folder / "short.toml").write_text((ROOT / CONFIG).read_text())
    short = (
        "--job-name=short-learner",
        "--time=8",
        "deploy/slurm/learner.sbatch",
        "short.toml",
    )
    job = site.submit(*short)
    site.wait_for("the job ends", lambda: site.cluster.state(job) == "FAILED")
    log = (site.folder / f"short-learner-{job}.log").read_text()
    assert (
        "the time limit left no room for a step: Slurm tells this job to end 600 s"
        in log
    )
    assert "REQUEUE" not in log
