"""Takes turns in filling the memory of a GPU that several processes of a run use.

vLLM measures at its start how much memory it takes, by how much less the whole card has: whatever
another process takes meanwhile is missing from its KV cache, and what another gives back stops it
("Error in memory profiling", 0.32.0). So an engine starts alone on its cards; trainer ranks load
beside each other, but beside no engine that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slipstream.protocol.errors import RunFailed
from slipstream.protocol.gpus import find_gpu, list_gpus, visible_ids

RETRY_S = 0.1


def cards_of(environ: Mapping[str, str], first: int, count: int) -> list[str]:
    """Names of the GPUs that CUDA would number `first`, ..., equal in all processes of a host.

    Empty without a driver.
    """
    gpus = list_gpus()
    ids = visible_ids(environ, gpus)[first : first + count]
    found = [(find_gpu(name, gpus), name) for name in ids]
    return [gpu.uuid if gpu is not None else name for gpu, name in found]


@contextlib.contextmanager
def fill_cards(
    folder: Path, cards: Sequence[str], *, alone: bool, limit_s: float
) -> Iterator[None]:
    """Holds the turn of all `cards` while the block runs, and none of them while it waits.

    `alone`: with nobody beside; otherwise with others that need not be alone. Processes meet in
    `folder`. RunFailed when the turn did not come within `limit_s`.
    """
    if not cards:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = []
        for card in sorted(set(cards)):
            files.append(os.open(folder / f"{card}.lock", os.O_RDWR | os.O_CREAT, 0o600))
            stack.callback(os.close, files[-1])
        deadline_s = time.monotonic() + limit_s
        while not _take(files, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > deadline_s:
                raise RunFailed(
                    f"another process of the run did not end loading on GPU {', '.join(cards)} "
                    f"within {limit_s:g} s"
                )
            time.sleep(RETRY_S)
        try:
            yield
        finally:
            # Closing alone would not do: a forked child has the descriptor too.
            _leave(files)


def _take(files: Sequence[int], kind: int) -> bool:
    """All or none: who waits while it holds one may be waited for by a rank's own peers."""
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
