"""The doctor in an allocation of two real nodes of Slurm."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs import slurm_cluster
from support.rigs.run_processes import empty_model, write_config
from support.rigs.slurm_cluster import SlurmCluster

MISSING = slurm_cluster.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
MAKE, LEARNER = DEPLOY / "make_certificates.sh", DEPLOY / "slurm" / "learner.sbatch"
DOCTOR = """\
export NODE_RANK=$SLURM_NODEID
exec slipstream doctor config.toml --role learner --master n1:29500 --json
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    # Short, because sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with SlurmCluster(folder, nodes=2) as cluster:
            site = folder / "site"
            site.mkdir()
            subprocess.run([MAKE, site / "secrets", "n1"], check=True, capture_output=True)
            files = {"token_file": "token", "tls_ca": "ca.pem"}
            files |= {"tls_certificate": "server.pem", "tls_key": "server.key"}
            write_config(
                site,
                empty_model(site),
                controller={"address": "n1:7070"},
                learner__world_size=2,
                learner__ranks_per_node=1,
                security={name: f"secrets/{file}" for name, file in files.items()},
            )
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_doctor_looks_at_two_nodes_before_a_controller_runs(cluster: SlurmCluster) -> None:
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--label", "bash", "-c", DOCTOR]
    said = cluster.call(*step, cwd=cluster.folder / "site", check=False)
    findings: dict[str, dict[str, dict[str, str]]] = {"0": {}, "1": {}}
    for line in said.splitlines():
        node, _, text = line.partition(": ")
        found = json.loads(text)
        findings[node][found["area"]] = found
    first, second = findings["0"], findings["1"]
    assert first["security"]["seen"] == second["security"]["seen"] == "TLS and token"
    assert second["network"]["seen"] == "eth0 leads to learner.master n1:29500"
    assert second["setup"]["verdict"] == "problem"
    assert "no controller answers at n1:7070 within 3 s" in second["setup"]["seen"]
