"""A check that all ranks share one folder, which a checkpoint needs."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.ranks.parallel import Ranks

# Seconds after which a network file system has surely shown a new file to other machines.
SEEN_LIMIT_S = 10.0
POLL_S = 0.1


def check_shared(folder: Path, ranks: Ranks, *, limit_s: float = SEEN_LIMIT_S) -> None:
    """Raises CheckpointError on every rank when one does not see a file of rank 0 in `folder`.

    Collective; blocks until all ranks have seen the file, or for `limit_s`.
    """
    mark = f".seen-by-all-{secrets.token_hex(8)}".encode() if ranks.is_main else None
    path = folder / ranks.broadcast_bytes(mark).decode()
    disk = DiskWork(folder, ranks)
    disk.together(lambda: _make(path) if ranks.is_main else None)
    seen = disk.together(lambda: _is_seen(path, disk, limit_s))
    blind = b"" if seen else f"rank {ranks.rank} on {socket.gethostname()}".encode()
    who = [name.decode() for name in ranks.gather_bytes(blind) if name]
    disk.together(lambda: path.unlink(missing_ok=True) if ranks.is_main else None)
    if who:
        raise CheckpointError(
            f"checkpoints need a run.dir that all nodes of the learner share: {', '.join(who)} "
            f"cannot see what rank 0 writes to {folder}; checkpoint.every_steps = 0 makes none"
        )


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _is_seen(path: Path, disk: DiskWork, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not (seen := path.exists()) and time.monotonic() < deadline_s:
        # The disk has answered, even without moving a byte.
        disk.moved(0)
        time.sleep(POLL_S)
    return seen
