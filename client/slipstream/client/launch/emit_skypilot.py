"""Writes the roles as a job group of SkyPilot: a task for the learner, one for each server."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.launch.roles import (
    LEARNER,
    ROLLOUT_SERVER,
    Role,
    Site,
    controller_port,
    learner_nodes,
    master_port,
    roles_of,
)
from slipstream.client.launch.shipped_code import model_folders
from slipstream.client.launch.template import filled_template, shell_command
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("skypilot.template.yml")
TASK = Path(__file__).with_name("skypilot_task.template.yml")
VOLUME = Path(__file__).with_name("skypilot_volume.template.yml")
# The folder for copied files on each machine; the shell there replaces the variable.
PLACE = "${HOME}/slipstream"
# Machines of a group start in any order, and the learner may be recovered.
PATIENCE = "--connect-timeout-s=3600"
GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+")


def skypilot_group(
    path: Path, overrides: Sequence[str], code: Path | None, folder: Path, *, on_gpus: bool
) -> tuple[dict[str, str], list[list[str]]]:
    """Returns the files of a run's job group by name, and the commands that start the group.

    `folder` is where the files will be saved. `code` is a folder of the user's modules to copy to
    the machines, or None. Raises ConfigError if no job group can have the run's name.
    """
    config = load_config(path, overrides)
    run = config.run.name
    if GROUP_NAME.fullmatch(run) is None:
        raise ConfigError(
            f"run.name must be a name in SkyPilot: letters, digits, '-' and '_', got {run!r}; "
            "run.name=NAME gives another"
        )
    models = model_folders(config)
    there = {setting: f"{PLACE}/models/{model.name}" for setting, model in models.items()}
    settings = [*overrides, *(f"{setting}={json.dumps(where)}" for setting, where in there.items())]
    nodes, _ = learner_nodes(config)
    # The learner's first machine in the group.
    host = f"{LEARNER}-0.{run}"
    tasks = []
    for name, runs in ((LEARNER, "/runs"), (ROLLOUT_SERVER, f"{PLACE}/runs")):
        site = Site(f"{PLACE}/config.toml", (*settings, f'run.dir="{runs}"'), f"{PLACE}/secrets")
        role = roles_of(config, site, on_gpus=on_gpus)[name]
        mounts = _mounts(role, path, set(models.values()))
        if code is not None:
            mounts = f"workdir: {json.dumps(str(code))}\n{mounts}"
        is_server = name == ROLLOUT_SERVER
        words = [*role.command, PATIENCE] if is_server else role.command
        accelerators = f"  accelerators: {{H100: {role.gpus}, H200: {role.gpus}}}\n"
        mounts += "" if is_server else f"volumes:\n  /runs: {run}-runs\n"
        tasks += [
            filled_template(
                TASK,
                name=f"{name}-{number}" if is_server else name,
                nodes=1 if is_server else nodes,
                cpus=role.cpus,
                accelerators=accelerators if role.gpus else "",
                spot=json.dumps(is_server),
                restarts=role.restarts,
                mounts=mounts,
                controller=f"{host}:{controller_port(config)}",
                master=f"{host}:{master_port(config)}",
                command=shell_command(words, indent=6),
            )
            for number in range(role.count.usual if is_server else 1)
        ]
    lock = "gpu.txt" if on_gpus else "cpu.txt"
    delay = math.ceil(config.rollout_server.drain_timeout_s)
    values = {"run": run, "folder": folder, "lock": lock, "delay": delay}
    access = "ReadWriteMany" if nodes > 1 else "ReadWriteOnce"
    files = {
        "run.yaml": filled_template(TEMPLATE, tasks="".join(tasks).rstrip(), **values),
        "volume.yaml": filled_template(VOLUME, run=run, access=access),
    }
    lock = f"LOCK=ADDRESS-OF-THE-RELEASE/{lock}"
    return files, [
        ["deploy/make_certificates.sh", "secrets", host],
        ["sky", "volumes", "apply", str(folder / "volume.yaml")],
        ["sky", "jobs", "launch", "--env", lock, str(folder / "run.yaml")],
    ]


def _mounts(role: Role, path: Path, models: set[Path]) -> str:
    """Returns the `file_mounts` of a role as YAML: the files that SkyPilot copies to its machines.

    They are the settings at `path`, the role's secrets and the folders of `models`.
    """
    place = PLACE.replace("${HOME}", "~")
    files = {f"{place}/config.toml": str(path)}
    for secret in role.secrets:
        name = secret.file.removeprefix(f"{PLACE}/secrets/")
        if name != secret.file:
            is_server = role.name == ROLLOUT_SERVER and name == "token"
            files[f"{place}/secrets/{name}"] = f"secrets/{'rollout_server_' * is_server}{name}"
    files |= {f"{place}/models/{model.name}": str(model) for model in sorted(models)}
    lines = [f"  {there}: {json.dumps(here)}\n" for there, here in files.items()]
    return "file_mounts:\n" + "".join(lines)
