"""Turns for filling the memory of a GPU that several processes of a run use.

vLLM measures its memory use at its start by the free memory of the whole GPU. Memory that another
process takes meanwhile is missing from vLLM's KV cache, and memory that another process frees stops
vLLM ("Error in memory profiling", 0.32.0). So an engine starts alone on its GPUs; trainer ranks
load at the same time as each other, but never while an engine starts.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slipstream.core.errors import RunFailed
from slipstream.core.machine.gpus import Gpu, find_gpu, list_gpus, visible_ids

RETRY_S = 0.1


def gpu_names(
    environ: Mapping[str, str],
    first: int,
    count: int,
    *,
    find: Callable[[], Sequence[Gpu]] = list_gpus,
) -> list[str]:
    """Returns names of `count` GPUs from CUDA's number `first`, equal in all processes of a host.

    The list is empty without a driver.
    """
    gpus = find()
    ids = visible_ids(environ, gpus)[first : first + count]
    found = [(find_gpu(name, gpus), name) for name in ids]
    return [gpu.uuid if gpu is not None else name for gpu, name in found]


@contextlib.contextmanager
def fill_gpus(folder: Path, gpus: Sequence[str], *, alone: bool, limit_s: float) -> Iterator[None]:
    """Holds the turns of all `gpus` while the block runs, and no turn while it waits.

    If `alone`, no other process holds a turn on these GPUs at the same time; else other processes
    that are not `alone` may. The lock files are in `folder`. Raises RunFailed when the turn did not
    come within `limit_s`.
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
        while not _take(files, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
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


def _take(files: Sequence[int], kind: int) -> bool:
    """Takes all locks or none: a process that waited with some of them could cause a deadlock."""
    try:
        for file in files:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        _leave(files)
        return False
    return True


def _leave(files: Sequence[int]) -> None:
    for file in files:
        fcntl.flock(file, fcntl.LOCK_UN)
