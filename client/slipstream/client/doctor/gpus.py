"""Checks the GPUs as the driver shows them: their number, their memory and their links."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from slipstream.client.doctor.machine import version_of
from slipstream.client.launch.checks import Finding, advice, ok, problem
from slipstream.client.launch.placement import uses_gpus
from slipstream.core.machine.gpus import VISIBLE, Gpu, Nvml, visible_ids
from slipstream.core.settings.config import Config
from slipstream.protocol.weights.nccl_environment import NCCL_ENVIRONMENT

GIB = 1 << 30
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


def check_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yields the findings about the GPUs of this machine; nothing if it has none."""
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
    """Yields the finding about a build of torch for CPUs: who wants the GPU that it cannot use."""
    version = version_of("torch")
    if version is None or uses_gpus():
        return
    seen = f"none is used: torch {version} is a build for CPUs"
    remedy = "install the builds for GPUs, of requirements/gpu.txt: docs/guides/deployment.md"
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
    kinds = {(gpu.name, gpu.memory_bytes // GIB) for gpu in gpus}
    return ", ".join(
        f"{sum((g.name, g.memory_bytes // GIB) == (name, gib) for g in gpus)} x {name} with "
        f"{gib} GiB"
        for name, gib in sorted(kinds)
    )


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
    """Checks the variables that both ends of a communicator must have alike."""
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
