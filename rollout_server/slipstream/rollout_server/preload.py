"""Imports the modules of a rollout server, after setting the variables that vLLM then reads."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.configuration.config_file import load_config
from slipstream.core.machine.process import without_collections
from slipstream.core.settings.config import Config
from slipstream.rollout_server import process


def preload(arguments: Sequence[str]) -> None:
    """Imports the modules that a server with these command-line `arguments` needs.

    The fork server calls this function before it forks rollout servers.
    """
    import_engine(load_config(Path(arguments[arguments.index("--config") + 1])))


def import_engine(config: Config) -> None:
    """Imports vLLM and the modules of the server.

    Ends this process with code NOT_STARTED if that exceeds `rollout_server.start_timeout_s`. Raises
    ConfigError if a package that vLLM imports is broken.
    """
    on_cpu = process.is_cpu_build()
    os.environ.update(process.engine_environment(config, on_cpu=on_cpu))
    with process.limited_start(config.rollout_server.start_timeout_s), without_collections():
        process.check_companions()
        for name in ("vllm.engine", "episodes.renderer", "service"):
            importlib.import_module(f"slipstream.rollout_server.{name}")
        importlib.import_module("transformers")
        if on_cpu:
            # The engine would import this module at its start.
            importlib.import_module("vllm.v1.worker.cpu_worker")
