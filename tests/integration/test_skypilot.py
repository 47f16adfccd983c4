"""SkyPilot reads the job group of deploy/skypilot, by its own parser."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from slipstream.client.cli import parse
from slipstream.core.configuration.config_file import load_config
from support.rigs import tools

ROOT = Path(__file__).parents[2]
PYTHON = tools.folder("skypilot") / "bin" / "python"
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
needs_skypilot = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no SkyPilot here: {tools.HOW}"
)
# `validate` looks for the catalogue of GPUs, which is downloaded: without GPUs there is no need.
PROGRAM = """
import json, sys
from unittest import mock
import sky
from sky.utils import dag_utils, yaml_utils

group = dag_utils.load_dag_from_yaml("skypilot/run.yaml", env_overrides=[("LOCK", "cpu.txt")])
if "--validate" in sys.argv:
    group.validate()
if "--optimize" in sys.argv:
    for task in group.tasks:
        # Only a cluster of Kubernetes has the volume, and none is here to be asked what it has.
        task.set_volumes({})
    with mock.patch(
        "sky.check.get_cached_enabled_clouds_or_refresh", return_value=[sky.clouds.RunPod()]
    ):
        group = sky.Optimizer.optimize(group, quiet=True)
volume = sky.volumes.Volume.from_yaml_config(yaml_utils.read_yaml("skypilot/volume.yaml"))
volume.validate(skip_cloud_compatibility=True)
tasks = {
    task.name: {
        "nodes": task.num_nodes,
        "spot": sorted({each.use_spot for each in task.resources}),
        "accelerators": [each.accelerators for each in task.resources],
        "recovery": [each.job_recovery for each in task.resources],
        "mounts": task.file_mounts,
        "volumes": task.volumes,
        "workdir": task.workdir,
        "chosen": str(task.best_resources),
    }
    for task in group.tasks
}
primary = [task.name for task in group.tasks if group.is_primary_task(task.name)]
print("\\n" + json.dumps({"is_group": group.is_job_group(), "primary": primary, "tasks": tasks}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with configuration, secrets, code and model."""
    for name in ("models/policy", "my_code"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run.toml").write_text(
        (ROOT / "deploy/configs/quickstart.toml").read_text()
    )
    shutil.copytree(ROOT / "deploy" / "skypilot", tmp_path / "skypilot")
    make = [
        ROOT / "deploy" / "make_certificates.sh",
        tmp_path / "secrets",
        "learner-0.first",
    ]
    subprocess.run(make, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder: Path, *options: str) -> dict[str, Any]:
    """What SkyPilot says of the group."""
    environ = {
        **os.environ,
        "HOME": str(folder),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    command = [PYTHON, "-c", PROGRAM, *options]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    parsed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return parsed


def edit(folder: Path, right: str, other: str) -> None:
    """Edits the group, as a user does."""
    path = folder / "skypilot/run.yaml"
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, other))


def ask_for_gpus(folder: Path) -> None:
    """Takes the marks of comments from the lines about GPUs."""
    edit(folder, "  # accelerators", "  accelerators")


def test_the_commands_of_the_tasks_are_ours() -> None:
    configs = []
    for task in list(
        yaml.safe_load_all((ROOT / "deploy/skypilot/run.yaml").read_text())
    )[1:]:
        text = task["run"].partition("exec ")[2].replace("\\\n", " ")
        text = text.replace("$SKYPILOT_NODE_RANK", "0").replace("$HOME", "/home/me")
        text = text.replace(" ~/", " /home/me/")
        program, *words = shlex.split(text)
        assert program == "slipstream"
        arguments = parse(words)
        configs.append(
            load_config(ROOT / "deploy/configs/quickstart.toml", arguments.overrides)
        )
        files = [Path(file).name for file in task["file_mounts"]]
        read = [
            value
            for value in vars(configs[-1].security).values()
            if isinstance(value, Path)
        ]
        assert {path.name for path in read} <= {*files}
    learner, server = configs
    assert (learner.run.name, str(learner.run.dir)) == ("first", "/runs")
    assert (server.run.name, server.security.tls_key) == ("first", None)


@needs_skypilot
def test_the_group_is_read_and_validated(folder: Path) -> None:
    validation = read(folder, "--validate")
    assert (validation["is_group"], validation["primary"]) == (True, ["learner"])
    learner, server = (
        validation["tasks"][name] for name in ("learner", "rollout-server-0")
    )
    assert (learner["spot"], learner["volumes"]) == ([False], {"/runs": "first-runs"})
    assert (server["nodes"], server["spot"]) == (1, [True])
    assert server["recovery"][0]["max_restarts_on_errors"] == 20
    for task in (learner, server):
        assert task["workdir"] == str(folder / "my_code")
        for local in task["mounts"].values():
            assert (folder / local).exists()


@needs_skypilot
def test_gpus_are_asked_for(folder: Path) -> None:
    edit(
        folder,
        "num_nodes: 1\nresources:\n  # infra",
        "num_nodes: 2\nresources:\n  # infra",
    )
    ask_for_gpus(folder)
    learner = read(folder)["tasks"]["learner"]
    assert learner["nodes"] == 2
    kinds = [kind for kinds in learner["accelerators"] for kind in kinds.items()]
    assert sorted(kinds) == [("H100", 8), ("H200", 8)]


# A cloud with two kinds of machines, each on demand and as spot.
CATALOGS = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,['RunPod']\nH200,['RunPod']\n",
    "runpod/vms.csv": """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,AvailabilityZone
1x_H100,H100,1.0,16.0,188.0,US,1.25,2.39,US-CA-2
8x_H100,H100,8.0,128.0,1504.0,US,9.25,18.39,US-CA-2
1x_H200,H200,1.0,16.0,188.0,US,1.75,3.59,US-CA-2
""",
}


@needs_skypilot
def test_the_optimizer_finds_machines_and_takes_spot_for_servers_alone(
    folder: Path,
) -> None:
    for name, text in CATALOGS.items():
        path = folder / ".sky/catalogs/v8" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    ask_for_gpus(folder)
    tasks = read(folder, "--optimize")["tasks"]
    assert "8x_H100," in tasks["learner"]["chosen"]
    assert "1x_H100[Spot]" in tasks["rollout-server-0"]["chosen"]
