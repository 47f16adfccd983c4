"""Kubernetes' own tools and schemas read the folder that `slipstream roles` writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from slipstream.client.cli import main

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "support" / "rigs" / "kubernetes_schemas.py"
TOOLS = Path(os.environ.get("SLIPSTREAM_KUBERNETES", "none"))
PYTHON, KUBECTL = TOOLS / "bin" / "python", TOOLS / "kubectl"
# The oldest, a middle and the newest one that the package has.
VERSIONS = ("1.27", "1.32", "1.37")
KINDS = {"JobSet", "Job", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap"}
KINDS |= {"Secret", "PersistentVolumeClaim"}
SEVERAL = ("learner.world_size=8", "learner.ranks_per_node=2", "rollout_server.count=4")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (PYTHON.exists() and KUBECTL.exists()),
        reason="SLIPSTREAM_KUBERNETES must name a virtual environment with kubernetes-validate, "
        "kubectl and a folder crds",
    ),
]


METRICS = 'tracking.prometheus="127.0.0.1:9400"'


def written(folder: Path, *settings: str) -> Path:
    """The folder of the quickstart with these settings, with its secrets."""
    (folder / "mine" / "inner").mkdir(parents=True)
    for name in ("mine/words.py", "mine/inner/deep.py"):
        (folder / name).write_text("X = 1\n")
    out = folder / "kubernetes"
    config = str(ROOT / "deploy/configs/quickstart.toml")
    code = ["--code", str(folder / "mine")]
    assert main(["roles", config, *settings, "--for", "kubernetes", "--out", str(out), *code]) == 0
    make = [ROOT / "deploy" / "make_certificates.sh", out / "secrets", "learner"]
    subprocess.run(make, check=True, capture_output=True)
    return out


def built(folder: Path, *components: str) -> str:
    """What kustomize makes of a folder, and its claims."""
    path = folder / "kustomization.yaml"
    chosen = f"\ncomponents: [{', '.join(components)}]\n"
    text, count = re.subn(r"\n# components: .*\n", chosen, path.read_text())
    assert count == 1
    path.write_text(text)
    command = [KUBECTL, "kustomize", folder]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return f"{shown.stdout}---\n{(folder / 'claims.yaml').read_text()}"


def judged(manifests: str) -> list[dict[str, str | None]]:
    """What the schemas say to each resource."""
    command: Sequence[Path | str] = [PYTHON, CHECK, TOOLS / "crds", *VERSIONS]
    ended = subprocess.run(command, input=manifests, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param((METRICS,), set(), id="smallest"),
        pytest.param((*SEVERAL, METRICS, "--gpus"), set(), id="several"),
        pytest.param(('queue.kind="redis"', METRICS), {"StatefulSet", "Service"}, id="queue"),
    ],
)
def test_the_schemas_of_three_versions_and_of_the_crds_take_it(settings, more, tmp_path):
    found = judged(built(written(tmp_path, *settings), "kueue", "monitor", "scaling"))
    assert [each for each in found if each["wrong"]] == []
    assert {each["kind"] for each in found} == KINDS | {"ScaledObject", "PodMonitor"} | more
    assert {each["version"] for each in found} == {"CRD", *VERSIONS}


def test_the_schemas_refuse_what_is_wrong(tmp_path: Path) -> None:
    manifests = built(written(tmp_path, METRICS), "scaling")
    wrong = {
        "failurePolicy": "failurePolicies",
        "terminationGracePeriodSeconds": "gracePeriod",
        "pollingInterval": "pollEvery",
    }
    for right, other in wrong.items():
        assert right in manifests
        assert any(each["wrong"] for each in judged(manifests.replace(right, other)))


def test_kustomize_joins_what_belongs_together(tmp_path: Path) -> None:
    text = built(written(tmp_path, *SEVERAL, METRICS, "--gpus"), "kueue", "scaling")
    resources = {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)
    }
    jobset = resources["JobSet", "quickstart"]
    server = resources["Deployment", "quickstart-rollout-server"]
    for each in (jobset, server):
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"
    assert "replicas" not in server["spec"]
    first, further = jobset["spec"]["replicatedJobs"]
    assert (first["replicas"], further["replicas"]) == (1, 3)
    pods = [job["template"]["spec"]["template"]["spec"] for job in (first, further)]
    pods.append(server["spec"]["template"]["spec"])
    for pod in pods:
        (container,) = pod["containers"]
        assert container["image"] == "slipstream:gpu"
        assert container["resources"]["limits"]["nvidia.com/gpu"] in (1, 2)
        for volume in pod["volumes"]:
            if "configMap" in volume:
                data = resources["ConfigMap", volume["configMap"]["name"]]["data"]
                assert {item["key"] for item in volume["configMap"].get("items", [])} <= {*data}
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in resources
    keys = [
        {*resources["Secret", f"quickstart-{name}"]["data"]}
        for name in ("learner", "learner-node", "rollout-server")
    ]
    own = {"server.pem", "server.key", "metrics_token"}
    assert keys == [{"ca.pem", "token", *own}, *[{"ca.pem", "token"}] * 2]
