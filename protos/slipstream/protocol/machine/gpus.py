"""The GPUs of this machine, by the driver's library, without starting torch or CUDA.

A process that asks CUDA holds memory on a GPU from then on, and can no longer fork.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


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
    """NVIDIA's management library, open inside the context; `library` is None without a driver."""

    def __init__(self, file: str = LIBRARY) -> None:
        self.library: ctypes.CDLL | None = None
        self._file = file

    def __enter__(self) -> Nvml:
        try:
            library = ctypes.CDLL(self._file)
        except OSError:
            return self
        if library.nvmlInit_v2() == 0:
            self.library = library
        return self

    def __exit__(self, *_: object) -> None:
        if self.library is not None:
            self.library.nvmlShutdown()

    def text(self, name: str, *arguments: object) -> str:
        """Returns the string that function `name` fills in; "" when it fails."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        if self.library is None or self.library[name](*arguments, buffer, _TEXT_BYTES) != 0:
            return ""
        return buffer.value.decode()

    def number(self, name: str, *arguments: object) -> int | None:
        """Returns the unsigned number that function `name` fills in; None when it fails."""
        value = ctypes.c_uint()
        if self.library is None or self.library[name](*arguments, ctypes.byref(value)) != 0:
            return None
        return value.value

    def device(self, index: int) -> ctypes.c_void_p | None:
        """Returns the handle of a GPU; None if there is no such GPU."""
        handle = ctypes.c_void_p()
        library = self.library
        if library is None or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            return None
        return handle


def list_gpus(*, library: str = LIBRARY) -> tuple[Gpu, ...]:
    """Returns all GPUs that the driver shows to this machine or container; () without a driver."""
    with Nvml(library) as nvml:
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
    """Returns the GPU with this number, UUID or first part of a UUID; None if there is none."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None
