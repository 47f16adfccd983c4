"""The command `slipstream roles`: prints the roles of a run, or writes them as files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.launch.emit_compose import compose_file
from slipstream.client.launch.emit_ray import ray_program
from slipstream.client.launch.emit_slurm import slurm_files
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.roles import Roles, Site, controller_port, master_port, roles_of
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError


def print_schema() -> int:
    """Prints the JSON schema of what `print_roles` prints."""
    say(json.dumps(Roles.model_json_schema(), indent=2))
    return 0


def print_roles(
    path: Path, overrides: Sequence[str], *, target: str | None, out: Path | None
) -> int:
    """Prints the roles as JSON, or writes them to `out` as the files of the scheduler `target`."""
    out = out or Path(target or ".")
    if target == "compose":
        beside = os.path.relpath(path, out)
        beside = beside if beside.startswith(".") else f"./{beside}"
        name = "docker-compose.yml"
        write_files({name: compose_file(path, overrides, beside)}, out)
        say(f"docker compose --file {shlex.quote(str(out / name))} --env-file HOST.env up")
        return 0
    config = load_config(path, overrides)
    site = Site(config=str(path), settings=tuple(overrides))
    roles = roles_of(config, site, on_gpus=uses_gpus())
    if target is None:
        say(roles.model_dump_json(indent=2))
        return 0
    ports = {"controller_port": controller_port(config), "master_port": master_port(config)}
    if target == "ray":
        files = {"run.py": ray_program(roles, str(out / "run.py"), **ports)}
    else:
        files = slurm_files(roles, str(out), **ports)
    write_files(files, out)
    start = "python" if target == "ray" else "sbatch"
    for name in files:
        say(f"{start} {shlex.quote(str(out / name))}")
    return 0


def write_files(files: dict[str, str], out: Path) -> None:
    """Writes the files; raises ConfigError rather than write over one that differs."""
    for name, text in files.items():
        path = out / name
        if path.exists() and path.read_text() != text:
            raise ConfigError(f"{path} exists and differs: remove it, or name another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
