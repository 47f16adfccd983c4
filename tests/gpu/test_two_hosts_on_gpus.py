"""Two hosts made of one machine: weights cross between them, with four GPUs gradients too.

Each host is a network namespace. NCCL is told that they are two hosts, so it sends through sockets
what it would else send over NVLink or shared memory.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import tomli_w
import torch
from support.fakes.tiny_models import make_model_folder
from support.rigs import namespaces, run_processes
from support.rigs.compose_file import DEPLOY
from support.rigs.namespaces import Network, poll

from benchmarks.common.shapes import make_apart

# Rehearses everything without a GPU: on gloo, with a tiny model.
REHEARSAL = "SLIPSTREAM_REHEARSAL" in os.environ
MISSING = namespaces.missing()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(560),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 and not REHEARSAL, reason="fewer than 2 GPUs"
    ),
]
STEPS = 16
KILLED_AFTER = 7
LIMIT_S = 240.0
ADDRESSES = {"first": "10.0.0.10", "second": "10.0.0.11"}
# With two GPUs the first host has the learner and the second one the rollout server.
SMALL = torch.cuda.device_count() < 4 and not REHEARSAL
LEARNERS = ("first",) if SMALL else tuple(ADDRESSES)
SERVERS = ("second",) if SMALL else tuple(ADDRESSES)
MASTER = f"{ADDRESSES['first']}:29500"
CONTROLLER = f"{ADDRESSES['first']}:7070"


@dataclass
class Cluster:
    """Both hosts, the folder that they share, and the commands that run on them."""

    network: Network
    folder: Path
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def steps(self) -> int:
        """The number of steps that the run has a row of metrics for."""
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def start(self, host: str, command: str, gpu: int, *arguments: str) -> None:
        """Starts a command of a host's on one GPU."""
        rank = list(ADDRESSES).index(host)
        environ = os.environ | {
            "NODE_RANK": str(rank),
            "CUDA_VISIBLE_DEVICES": str(rank if SMALL else 2 * rank + gpu),
            "NCCL_HOSTID": host,
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        name = f"{command}-{host}"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.commands[name] = subprocess.Popen(
                [
                    "nsenter",
                    f"--net=/proc/{self.network.hosts[host].pid}/ns/net",
                    *run_processes.COMMAND,
                    command,
                    "config.toml",
                    *arguments,
                ],
                env=environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_learner(self, host: str) -> None:
        self.start(host, "learner", 0, f"--master={MASTER}")

    def start_server(self, host: str) -> None:
        self.start(
            host,
            "rollout-server",
            1,
            f"--controller={CONTROLLER}",
            f"--server-id={host}",
        )

    def wait(self, name: str) -> int:
        try:
            return self.commands[name].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} still runs after {LIMIT_S:g} s\n{self.logs()}")

    def until_step(self, step: int) -> None:
        for _ in poll(LIMIT_S):
            if self.steps() >= step:
                return
            ended = {
                n: c.returncode
                for n, c in self.commands.items()
                if c.poll() is not None
            }
            assert not ended, f"{ended}\n{self.logs()}"
        pytest.fail(f"{self.steps()} steps after {LIMIT_S:g} s\n{self.logs()}")

    def until_said(self, text: str) -> None:
        """Waits until the first host's learner has printed `text`."""
        for _ in poll(LIMIT_S):
            if text in (self.folder / "learner-first.log").read_text():
                return
        pytest.fail(f"{text!r} was not said within {LIMIT_S:g} s\n{self.logs()}")

    def kill(self, *names: str) -> None:
        """Ends commands and all that they started at once, as a host that loses its power."""
        for name in names:
            command = self.commands.pop(name)
            family = [
                psutil.Process(command.pid),
                *run_processes.descendants(command.pid),
            ]
            for process in family:
                process.kill()
            command.wait()

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.run.glob("**/logs/*.log")]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted(paths)
        )


def write_config(folder: Path) -> None:
    """The settings of a cluster, with a small task and what both hosts need of it."""
    if REHEARSAL:
        model = make_model_folder(
            folder / "model", num_attention_heads=4, num_key_value_heads=2
        )
    else:
        model = make_apart(folder / "model", "0.6B", max_positions=1024)
    table = tomllib.loads((DEPLOY / "configs" / "cluster.toml").read_text())
    table["run"] = {"name": "run", "dir": str(folder), "steps": STEPS, "seed": 1}
    table["model"] = {
        "path": str(model),
        "dtype": "float32" if REHEARSAL else "bfloat16",
    }
    table["evaluations"] = []
    table["algorithm"] = {"group_size": 8, "groups_per_step": 4 if REHEARSAL else 16}
    reply = 8 if REHEARSAL else 256
    table["sampling"] = {"max_reply_tokens": reply, "max_episode_tokens": reply + 64}
    table["controller"] = {"address": CONTROLLER}
    table["learner"] = {
        "world_size": len(LEARNERS),
        "ranks_per_node": 1,
        "export_final": False,
    }
    table["checkpoint"] = {"every_steps": 6}
    table["weights"] = {"verify_every": 1}
    if not REHEARSAL:
        table["weights"]["transport"] = "nccl"
    secrets = folder / "secrets"
    table["security"] = {
        "tls_ca": str(secrets / "ca.pem"),
        "token_file": str(secrets / "token"),
        "tls_certificate": str(secrets / "server.pem"),
        "tls_key": str(secrets / "server.key"),
    }
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    make = [DEPLOY / "make_certificates.sh", secrets, ADDRESSES["first"]]
    subprocess.run(make, check=True, capture_output=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Short, because sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-two-"))
    try:
        write_config(folder)
        with Network(folder / "hosts", user=os.getuid()) as network:
            for name, address in ADDRESSES.items():
                network.add_host(name, address)
            cluster = Cluster(network, folder)
            try:
                yield cluster
            finally:
                cluster.kill(
                    *(n for n, c in cluster.commands.items() if c.poll() is None)
                )
                if "OUT" in os.environ:
                    Path(os.environ["OUT"], "two-hosts.log").write_text(cluster.logs())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_on_two_hosts_loses_one_of_them_and_finishes(cluster: Cluster) -> None:
    times = {}
    start_s = time.monotonic()
    for host in LEARNERS:
        cluster.start_learner(host)
    for host in SERVERS:
        cluster.start_server(host)
    cluster.until_step(KILLED_AFTER)
    times["first steps"] = time.monotonic() - start_s
    cluster.kill(*(name for name in cluster.commands if name.endswith("-second")))
    start_s = time.monotonic()
    # The first host's rank ends with the connection and waits for the second one's, which a
    # scheduler starts again.
    cluster.until_said("second is gone" if SMALL else "starts again, start 2")
    times["noticed"] = time.monotonic() - start_s
    before = cluster.steps()
    if "second" in LEARNERS:
        cluster.start_learner("second")
    cluster.start_server("second")
    cluster.until_step(before + 1)
    times["next step"] = time.monotonic() - start_s
    # The second host's new server may still be loading when the run is over.
    names = [*(f"learner-{host}" for host in LEARNERS)]
    for name in names if SMALL else [*names, "rollout-server-first"]:
        assert cluster.wait(name) == 0, f"{name}\n{cluster.logs()}"
    summary = run_processes.checked(cluster.run)
    rows = run_processes.rows_of(cluster.run)[2:KILLED_AFTER]
    shown = ("step_s", "publish_s", "tokens_per_s", "logprob_gap_mean")
    medians = {k: statistics.median(r[k] for r in rows) for k in shown if k in rows[0]}
    print(json.dumps({"times": times, "medians": medians, "keys": sorted(rows[0])}))
    print(
        json.dumps({key: summary[key] for key in ("steps", "ledger", "max_lag_seen")})
    )
    assert summary["steps"] == STEPS
    assert summary["publishes_verified"] >= summary["publishes"] > 0
    assert summary["max_lag_seen"] <= 2
