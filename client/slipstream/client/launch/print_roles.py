"""Implements `slipstream roles`, which prints the roles of a run, or writes them as files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.launch.emit_compose import compose_file
from slipstream.client.launch.emit_kubernetes import CONFIG_MAP_BYTES, Pods
from slipstream.client.launch.emit_scripts import ray_program, slurm_files
from slipstream.client.launch.emit_skypilot import skypilot_group
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.roles import Roles, Site, controller_port, master_port, roles_of
from slipstream.client.launch.shipped_code import ShippedCode, left_behind, read_code
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError


def print_roles(
    path: Path | None,
    overrides: Sequence[str],
    *,
    target: str | None,
    out: Path | None,
    code: Path | None,
    gpus: bool,
    schema: bool,
) -> int:
    """Prints the roles as JSON, or writes them to `out` as the files of the scheduler `target`.

    `code` is a folder of the user's modules to ship with the files. `gpus` gives instances GPUs
    even if this machine's packages are CPU builds. `schema` prints the roles' JSON schema instead.
    Returns 0; raises ConfigError for arguments or settings that do not fit `target`.
    """
    if schema:
        say(json.dumps(Roles.model_json_schema(), indent=2))
        return 0
    if path is None:
        raise ConfigError("roles needs a CONFIG.toml")
    if target == "compose" and gpus:
        raise ConfigError(
            "--gpus is not for compose: add --file docker-compose.gpu.yml to its calls"
        )
    if code is not None and target not in ("kubernetes", "skypilot"):
        raise ConfigError("--code is for kubernetes and skypilot: all else reads this folder")
    on_gpus = gpus or uses_gpus()
    out = out or Path(target or ".")
    shipped = None
    if target == "kubernetes":
        shipped = read_code(code, out / "code", most_bytes=CONFIG_MAP_BYTES)
        pods = Pods(path, overrides, shipped, on_gpus=on_gpus)
        files, commands = pods.files(str(out)), pods.commands(out)
    elif target == "skypilot":
        shipped = ShippedCode() if code is None else read_code(code, code, most_bytes=None)
        files, commands = skypilot_group(path, overrides, code, out, on_gpus=on_gpus)
    elif target == "compose":
        beside = os.path.relpath(path, out)
        beside = beside if beside.startswith(".") else f"./{beside}"
        name = "docker-compose.yml"
        files = {name: compose_file(path, overrides, beside)}
        commands = [
            ["docker", "compose", "--file", str(out / name), "--env-file", "HOST.env", "up"]
        ]
    else:
        config = load_config(path, overrides)
        roles = roles_of(config, Site(str(path), tuple(overrides)), on_gpus=on_gpus)
        if target is None:
            say(roles.model_dump_json(indent=2))
            return 0
        ports = {"controller_port": controller_port(config), "master_port": master_port(config)}
        if target == "ray":
            files = {"run.py": ray_program(roles, str(out / "run.py"), **ports)}
        else:
            files = slurm_files(roles, str(out), **ports)
        start = "python" if target == "ray" else "sbatch"
        commands = [[start, str(out / name)] for name in files]
    write_files(files, out)
    # These schedulers' machines do not share this machine's folders.
    for module in () if shipped is None else left_behind(load_config(path, overrides), shipped):
        say(f"! {module} is in this folder alone: --code FOLDER ships a folder that has it")
    for command in commands:
        say(shlex.join(command))
    return 0


def write_files(files: dict[str, str], out: Path) -> None:
    """Writes the files; raises ConfigError instead of overwriting a file with other content."""
    for name, text in files.items():
        path = out / name
        if path.exists() and path.read_text() != text:
            raise ConfigError(f"{path} exists and differs: remove it, or name another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
