"""The GPUs of this machine, by the driver's own library: neither torch nor CUDA is started.

A process that asks CUDA holds memory on a card from then on, and cannot fork any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


@dataclass(frozen=True)
class Gpu:
    """One card as the driver knows it."""

    # The number of nvidia-smi.
    index: int
    # "GPU-..." of the driver; the same in every process and container.
    uuid: str
    name: str
    memory_bytes: int


class Nvml:
    """NVIDIA's management library while the context lasts; `opened` is False without a driver."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None

    def __enter__(self) -> Nvml:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return self
        if library.nvmlInit_v2() == 0:
            self.library = library
        return self

    def __exit__(self, *_: object) -> None:
        if self.library is not None:
            self.library.nvmlShutdown()

    def text(self, name: str, *arguments: object) -> str:
        """The string that function `name` fills in; empty when it fails."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        if self.library is None or self.library[name](*arguments, buffer, _TEXT_BYTES) != 0:
            return ""
        return buffer.value.decode()

    def number(self, name: str, *arguments: object) -> int | None:
        """The unsigned number that function `name` fills in; None when it fails."""
        value = ctypes.c_uint()
        if self.library is None or self.library[name](*arguments, ctypes.byref(value)) != 0:
            return None
        return value.value

    def device(self, index: int) -> ctypes.c_void_p | None:
        """The handle of a card; None when there is none."""
        handle = ctypes.c_void_p()
        library = self.library
        if library is None or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            return None
        return handle


def list_gpus() -> tuple[Gpu, ...]:
    """All cards that the driver shows to this machine or container; none without a driver."""
    with Nvml() as nvml:
        found = []
        for index in range(nvml.number("nvmlDeviceGetCount_v2") or 0):
            handle = nvml.device(index)
            if nvml.library is None or handle is None:
                continue
            # total, free, used
            memory = (ctypes.c_ulonglong * 3)()
            nvml.library.nvmlDeviceGetMemoryInfo(handle, memory)
            found.append(
                Gpu(
                    index,
                    nvml.text("nvmlDeviceGetUUID", handle),
                    nvml.text("nvmlDeviceGetName", handle),
                    memory[0],
                )
            )
        return tuple(found)


def visible_ids(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """What CUDA would number 0, 1, ...: entries of CUDA_VISIBLE_DEVICES, or all cards' numbers.

    Like CUDA it takes the entries before the first one that names no card.
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
    """The card with this number, or with this UUID or the beginning of it; None without one."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None
