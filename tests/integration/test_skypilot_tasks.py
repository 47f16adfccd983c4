"""The tasks of a job group for SkyPilot, carried out on machines made of namespaces.

Their shell, environment, files and names are those that SkyPilot gives; this checkout stands for
what `setup` installs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.rigs import namespaces
from support.rigs.namespaces import Container, Mount, Network, image_environ, poll

MISSING = namespaces.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
USER = 1000
LIMIT_S = 900.0
HOME = Path("/home/sky")
ADDRESSES = {"learner": "10.79.0.10", "rollout-server-0": "10.79.0.20"}
STEPS = 3
# What the user's file has beside the quickstart's own settings.
EDITS = {"steps = 150": f"steps = {STEPS}", "slipstream.environments.echo:Echo": "letters:Letters"}
CODE = "from slipstream.environments.echo import Echo\n\n\nclass Letters(Echo):\n    pass\n"


def write_group(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Lays out a user's folder; returns the documents of the group."""
    (folder / "my_code").mkdir()
    (folder / "my_code" / "letters.py").write_text(CODE)
    shutil.copytree(model, folder / "models" / "policy")
    text = (DEPLOY / "configs/quickstart.toml").read_text()
    for right, other in EDITS.items():
        assert right in text
        text = text.replace(right, other)
    (folder / "run.toml").write_text(f"{text}\n[controller]\nstall_timeout_s = 1800\n")
    make = [DEPLOY / "make_certificates.sh", folder / "secrets", "learner-0.first"]
    subprocess.run(make, check=True, capture_output=True)
    return list(yaml.safe_load_all((DEPLOY / "skypilot" / "run.yaml").read_text()))


def start(network: Network, folder: Path, task: dict[str, Any], hosts: dict[str, str]) -> Container:
    """Starts a task on its machine, with the files that SkyPilot brings there."""
    home = folder / "homes" / task["name"]
    shutil.copytree(folder / task["workdir"], home / "sky_workdir")
    for there, here in task["file_mounts"].items():
        place = home / Path(there).relative_to("~")
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (folder / here).is_dir() else shutil.copy)(folder / here, place)
    mounts = [Mount(home, HOME, writable=True)]
    for there, name in task.get("volumes", {}).items():
        (folder / "volumes" / name).mkdir(parents=True)
        mounts.append(Mount(folder / "volumes" / name, Path(there), writable=True))
    for mount in mounts:
        for path in (mount.source, *mount.source.rglob("*")):
            os.chown(path, USER, USER)
    address = ADDRESSES[task["name"]]
    places = {"HOME": str(HOME), "XDG_CACHE_HOME": "/tmp/cache"}
    machine = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": address}
    return network.add_host(task["name"], address).run(
        "task",
        ["bash", "-c", task["run"]],
        environ=image_environ() | places | machine,
        mounts=mounts,
        working_folder=str(HOME / "sky_workdir"),
        hosts=hosts,
    )


@pytest.fixture(scope="module")
def run(tiny_model: Path) -> Iterator[Path]:
    """The run's folder, after its end."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-sky-"))
    folder.chmod(0o755)
    try:
        header, *tasks = write_group(folder, tiny_model)
        names = {f"{name}-0.{header['name']}": ip for name, ip in ADDRESSES.items()}
        with Network(folder / "hosts", user=USER) as network:
            machines = [start(network, folder, task, names) for task in tasks]
            for _ in poll(LIMIT_S, every_s=0.5):
                if any(machine.exit_code is not None for machine in machines):
                    break
            logs = "\n".join(machine.log for machine in machines)
            assert machines[0].process.wait(LIMIT_S) == 0, logs
            yield folder / "volumes" / "first-runs" / "first"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_tasks_of_the_group_train(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert (summary["ledger"]["difference"], summary["ledger"]["queued"]) == (0, 0)
