"""What is checked before anything expensive starts; every finding is one line."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

from slipstream.protocol.config import Config, address_parts
from slipstream.protocol.config_file import check_model
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.security import Credentials, check_address

ENGINES = {"torch": "learner", "megatron.core": "learner", "vllm": "rollout server"}


def check_settings(config: Config) -> Credentials:
    """Checks what can be checked without starting anything; ConfigError."""
    check_model(config)
    credentials = Credentials.load(config.security)
    check_address(config.controller.address, credentials, what="controller.address")
    return credentials


def check_new_run(config: Config) -> None:
    """ConfigError when the run folder holds a run already."""
    if (config.run_dir / "journal").exists():
        raise ConfigError(
            f"{config.run_dir} holds a run already; choose another run.name or remove the folder"
        )


def check_port(address: str) -> None:
    """ConfigError when something listens on `address`."""
    host, port = address_parts(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"controller.address: cannot listen on {address}: {error.strerror}"
            ) from error


def check_installed(*names: str) -> None:
    """ConfigError when a package that this machine needs is missing."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                continue
        raise ConfigError(f"the {ENGINES[name]} needs the package {name}, which is not installed")


async def check_environments(config: Config, log_path: Path) -> None:
    """Loads every environment in a process of its own and resets its first task; ConfigError."""
    sections = [(e.name, e.reference, e.args, e.timeout_s) for e in config.environments]
    sections += [(e.name, e.reference, e.args, e.timeout_s) for e in config.evaluations]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    for name, reference, args, timeout_s in sections:
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "slipstream.client.worker", "--check", reference],
                *["--args", json.dumps(args), "--search-path", os.getcwd()],
                *["--timeout-s", str(timeout_s)],
                stdout=log,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await process.communicate()
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"exited with code {process.returncode}"
            raise ConfigError(f"environment {name}: {said}")


def free_port(host: str) -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
