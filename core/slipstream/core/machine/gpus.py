"""The GPUs of this machine, by the driver's library, without starting torch or CUDA.

A process that asks CUDA holds memory on a GPU from then on, and can no longer fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

VISIBLE = "CUDA_VISIBLE_DEVICES"
# With these variables kernels of a GPU keep all bits of float32 products. Without them NVIDIA's
# libraries, where TransformerEngine calls them, and Triton keep 10, and a probe of float32 fails.
ALL_BITS = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}


@dataclass(frozen=True)
class Gpu:
    """One GPU with the driver's data."""

    # Its number in nvidia-smi.
    index: int
    # The driver's "GPU-..." id; the same in every process and container.
    uuid: str
    name: str
    memory_bytes: int


class Nvml:
    """NVIDIA's management library, open inside the context; it answers None without a driver."""

    def __init__(self) -> None:
        self._is_open = False

    def __enter__(self) -> Nvml:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            pynvml.nvmlShutdown()

    def ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - each has its own type
        """Returns the answer of the library's function `name`, or None when it fails."""
        with contextlib.suppress(pynvml.NVMLError):
            return getattr(pynvml, name)(*arguments)
        return None


def list_gpus() -> tuple[Gpu, ...]:
    """Returns all GPUs that the driver shows to this machine or container; () without a driver."""
    found = []
    with Nvml() as nvml:
        for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            uuid = nvml.ask("nvmlDeviceGetUUID", handle) or ""
            name = nvml.ask("nvmlDeviceGetName", handle) or ""
            memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
            found.append(Gpu(index, uuid, name, 0 if memory is None else memory.total))
    return tuple(found)


def visible_ids(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Returns the names of CUDA's devices 0, 1, ...

    They are the entries of CUDA_VISIBLE_DEVICES before the first one that names no GPU, as in CUDA,
    or all GPUs' numbers without this variable.
    """
    if VISIBLE not in environ:
        return tuple(str(gpu.index) for gpu in gpus)
    found: list[str] = []
    for entry in environ[VISIBLE].split(","):
        name = entry.strip()
        if name in found or find_gpu(name, gpus) is None and not name.startswith("MIG-"):
            break
        found.append(name)
    return tuple(found)


def find_gpu(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns the GPU with this number, UUID or first part of a UUID, or None if there is none."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None
