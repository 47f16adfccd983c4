"""Lists this machine's GPUs through NVML, and locks them while a process fills their memory.

A process that initializes CUDA holds memory on a GPU from then on, and can no longer fork: nothing
here starts torch or CUDA.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
from slipstream.core.errors import RunFailed

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The share of its GPU that engines take beside a trainer rank, where a command starts both.
ENGINES_SHARE = "SLIPSTREAM_ENGINES_SHARE"
# With these variables kernels of a GPU keep all bits of float32 products. Without them NVIDIA's
# libraries, where TransformerEngine calls them, and Triton keep 10, and a probe of float32 fails.
ALL_BITS = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
# Seconds between two attempts at the locks.
RETRY_S = 0.1


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    # The number in nvidia-smi.
    index: int
    # The driver's "GPU-..." id; the same in every process and container.
    uuid: str
    name: str
    memory_bytes: int


@contextlib.contextmanager
def asking_nvml() -> Iterator[Callable[..., Any]]:
    """Yields a function that calls one of NVIDIA's management library by its name.

    It returns None where the library's function fails, as all do without a driver.
    """

    def ask(name: str, *arguments: object) -> Any:  # noqa: ANN401 - each has its own type
        with contextlib.suppress(pynvml.NVMLError):
            return getattr(pynvml, name)(*arguments)
        return None

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
        yield ask


def list_gpus() -> tuple[Gpu, ...]:
    """Returns all GPUs that the driver shows this machine or container, or () without a driver."""
    gpus = []
    with asking_nvml() as ask:
        for index in range(ask("nvmlDeviceGetCount") or 0):
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            uuid = ask("nvmlDeviceGetUUID", handle) or ""
            name = ask("nvmlDeviceGetName", handle) or ""
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            gpus.append(Gpu(index, uuid, name, 0 if memory is None else memory.total))
    return tuple(gpus)


def visible_ids(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Returns the names of CUDA's devices 0, 1, ... by CUDA_VISIBLE_DEVICES in `environ`.

    As in CUDA, the list ends before the first entry that is repeated or names no GPU. If the
    variable is unset, the names are the numbers of all GPUs.
    """
    if VISIBLE not in environ:
        return tuple(str(gpu.index) for gpu in gpus)
    names: list[str] = []
    for entry in environ[VISIBLE].split(","):
        name = entry.strip()
        if name in names or find_gpu(name, gpus) is None and not name.startswith("MIG-"):
            break
        names.append(name)
    return tuple(names)


def find_gpu(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns the GPU whose number, UUID or beginning of a UUID is `name`, or None without one."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None


def read_each_other(first: Gpu, second: Gpu) -> bool:
    """Whether each GPU can read the other's memory, without which CUDA IPC cannot join them."""
    with asking_nvml() as ask:
        handles = [ask("nvmlDeviceGetHandleByIndex", gpu.index) for gpu in (first, second)]
        # pynvml's own name for reading, `NVML_P2P_CAPS_INDEX_READ`, is a tuple, which it refuses.
        status = ask("nvmlDeviceGetP2PStatus", *handles, 0) if all(handles) else None
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def gpu_names(environ: Mapping[str, str], first: int, count: int) -> list[str]:
    """Returns the names of up to `count` GPUs, beginning with CUDA device `first`.

    A name is the same in all processes of a host: the GPU's UUID, or a MIG device's entry of
    CUDA_VISIBLE_DEVICES. Without a driver there are no names.
    """
    gpus = list_gpus()
    ids = visible_ids(environ, gpus)[first : first + count]
    gpus_and_names = [(find_gpu(name, gpus), name) for name in ids]
    return [gpu.uuid if gpu is not None else name for gpu, name in gpus_and_names]


@contextlib.contextmanager
def fill_gpus(folder: Path, gpus: Sequence[str], *, alone: bool, limit_s: float) -> Iterator[None]:
    """Holds the locks of all `gpus` while the block runs; waits until all are free at once.

    vLLM measures its memory use at its start by the free memory of the whole GPU. Memory that
    another process takes meanwhile is missing from vLLM's KV cache, and memory that another process
    frees stops vLLM ("Error in memory profiling", 0.32.0). So only one engine starts on a GPU at a
    time; trainer ranks load at the same time as each other, but never while an engine starts.

    If `alone`, the locks are exclusive; else they are shared with other processes that are not
    `alone`. The lock files are in `folder`, one for each name in `gpus`. Raises RunFailed if the
    locks are not free within `limit_s` seconds.
    """
    if not gpus:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = []
        for gpu in sorted(set(gpus)):
            files.append(os.open(folder / f"{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600))
            stack.callback(os.close, files[-1])
        deadline_s = time.monotonic() + limit_s
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        while True:
            # All locks or none: two processes that each kept some could wait for each other.
            try:
                for file in files:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _leave(files)
            if time.monotonic() > deadline_s:
                raise RunFailed(
                    f"another process of the run did not end loading on GPU {', '.join(gpus)} "
                    f"within {limit_s:g} s"
                )
            time.sleep(RETRY_S)
        try:
            yield
        finally:
            # `close` alone would not unlock: a forked child has the descriptor too.
            _leave(files)


def _leave(files: Sequence[int]) -> None:
    for file in files:
        fcntl.flock(file, fcntl.LOCK_UN)
