"""Work on a disk, for which no rank waits in a collective.

A file may take longer than any limit of a collective, and a disk may hang forever. So a thread of
each rank does the work, and meanwhile the ranks repeatedly exchange their states. The ranks
continue when all are done, and all fail if an unfinished rank has moved no byte for
`learner.timeout_s`. The file classes here count the bytes of each read and write, since a slow disk
moves some and a dead disk none.
"""

import hashlib
import io
import json
import os
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.checkpoints import DIGEST_BYTES
from slipstream.protocol.weights.publish_waits import started
from torch import Tensor

Result = TypeVar("Result")

# Seconds between two exchanges of states, at most a fourth of the limit of a collective.
MEET_S = 1.0
# A rank's state: whether it is done, whether it failed, bytes moved, seconds since the last move.
_STATE = struct.Struct("<??Qd")
# Seconds after which a network file system has surely shown a new file to other machines.
SEEN_LIMIT_S = 10.0
POLL_S = 0.1
# Most bytes of one system call.
PIECE_BYTES = 8 << 20
# Most bytes of a file that wait in main memory for the disk.
SYNC_BYTES = 32 << 20
# A smaller piece is digested faster here than in another thread; torch writes thousands of these.
_THREAD_BYTES = 64 << 10
_SAFETENSORS_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


class DiskWork:
    """Runs work of all ranks on the disk of `folder`; all but `start` and `moved` is collective."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self.ranks = ranks
        self._num_bytes, self._moved_s = 0, time.monotonic()

    def moved(self, num_bytes: int) -> None:
        """Counts `num_bytes` read from the disk or written to it; any thread may call it."""
        self._num_bytes += num_bytes
        self._moved_s = time.monotonic()

    def start(self, act: Callable[[], Result]) -> Future[Result]:
        """Runs `act` in a thread of this rank, and returns a future for its result."""

        def work() -> Result:
            if self.ranks.device.type == "cuda":
                # The current CUDA device is a setting of each thread.
                torch.cuda.set_device(self.ranks.device)
            return act()

        self._moved_s = time.monotonic()
        # The thread is a daemon: a disk that hangs must not block the end of the process.
        return started(work, name="checkpoint")

    def together(self, act: Callable[[], Result]) -> Result:
        """Runs `act` in a thread of each rank; returns this rank's result or fails like `wait`."""
        return self.wait(self.start(act))

    def on_main(self, act: Callable[[], Result]) -> Result | None:
        """Runs `act` in a thread of rank 0 alone; returns None on others or fails like `wait`."""
        return self.together(act if self.ranks.is_main else lambda: None)

    def wait(self, future: Future[Result]) -> Result:
        """Waits until all ranks are done, and returns the result of this rank's work.

        A rank whose work failed raises its error (an OSError as CheckpointError); the other ranks
        raise CheckpointError. If the disk of an unfinished rank is silent for too long, all raise
        CheckpointError, and the thread is left running.
        """
        before = -1
        while True:
            wait((future,), timeout=min(MEET_S, self.ranks.timeout_s / 4))
            states = self._meet(future)
            moved = sum(num_bytes for _, _, num_bytes, _ in states)
            if moved != before:
                self.ranks.activity.note()
            before = moved
            if all(is_done for is_done, *_ in states):
                break
        error = future.exception()
        if isinstance(error, OSError):
            # The error for a folder that cannot be copied has a list of (from, to, cause).
            many = isinstance(error, shutil.Error) and isinstance(error.args[0], list)
            cause = error.args[0][0][2] if many else error
            raise CheckpointError(f"the disk of {self._folder} failed: {cause}") from error
        if error is None and any(failed for _, failed, *_ in states):
            raise CheckpointError(f"the disk of {self._folder} failed on another rank")
        return future.result()

    def is_done(self, future: Future[Result]) -> bool:
        """Whether all ranks have done their work; raises CheckpointError for a silent disk."""
        return all(is_done for is_done, *_ in self._meet(future))

    def _meet(self, future: Future[Result]) -> list[tuple[bool, bool, int, float]]:
        """Exchanges the states (see `_STATE`); raises CheckpointError for a silent disk."""
        limit_s = self.ranks.timeout_s
        is_done = future.done()
        silent_s = time.monotonic() - self._moved_s
        failed = is_done and future.exception() is not None
        own_state = _STATE.pack(is_done, failed, self._num_bytes, silent_s)
        all_states = self.ranks.gather_bytes(own_state)
        states = [_STATE.unpack(state) for state in all_states]
        for rank, (is_done, _, _, silent_s) in enumerate(states):
            if not is_done and silent_s > limit_s:
                raise CheckpointError(
                    f"rank {rank} moved no byte to or from the disk of {self._folder} for "
                    f"{limit_s:g} s (learner.timeout_s)"
                )
        return states


def check_shared(folder: Path, ranks: Ranks, *, limit_s: float = SEEN_LIMIT_S) -> None:
    """Raises CheckpointError on all ranks if one sees no file of rank 0 in time; collective."""
    mark = f".seen-by-all-{secrets.token_hex(8)}".encode() if ranks.is_main else None
    path = folder / ranks.broadcast_bytes(mark).decode()
    disk = DiskWork(folder, ranks)

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()

    def is_seen() -> bool:
        deadline_s = time.monotonic() + limit_s
        while not (seen := path.exists()) and time.monotonic() < deadline_s:
            # The disk has answered, even without moving a byte.
            disk.moved(0)
            time.sleep(POLL_S)
        return seen

    disk.on_main(make)
    seen = disk.together(is_seen)
    blind = b"" if seen else f"rank {ranks.rank} on {socket.gethostname()}".encode()
    who = [name.decode() for name in ranks.gather_bytes(blind) if name]
    disk.on_main(lambda: path.unlink(missing_ok=True))
    if who:
        raise CheckpointError(
            f"checkpoints need a run.dir that all nodes of the learner share: {', '.join(who)} "
            f"cannot see what rank 0 writes to {folder}; checkpoint.every_steps = 0 makes none"
        )


class CountedFile(io.FileIO):
    """An unbuffered file, for a buffered one around it, that reports the bytes that it moves."""

    def __init__(self, path: Path, mode: str, moved: Callable[[int], None]) -> None:
        self._moved = moved
        super().__init__(path, mode)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Reads at most `PIECE_BYTES` into `buffer`; returns the number of bytes read."""
        count: int = super().readinto(memoryview(buffer).cast("B")[:PIECE_BYTES]) or 0
        self._moved(count)
        return count

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Writes at most `PIECE_BYTES` of `data`; returns the number of bytes written."""
        count: int = super().write(memoryview(data).cast("B")[:PIECE_BYTES])
        self._moved(count)
        return count


class SyncedFile(CountedFile):
    """A file that is synced while it is written; a second thread computes its digest meanwhile.

    Without these syncs all bytes would go to the disk at the end. Other syncs, for example of the
    controller's journal on the same disk, would then wait for them.
    """

    def __init__(self, path: Path, moved: Callable[[int], None]) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._digesting = ThreadPoolExecutor(1, "checkpoint-digest")
        self._waiting = 0
        # The error with which the disk refused a write.
        self.problem: OSError | None = None
        super().__init__(path, "wb", moved)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Writes all of `data`, and returns its number of bytes."""
        view = memoryview(data).cast("B")
        digested = None
        done = 0
        if len(view) < _THREAD_BYTES:
            self._digest.update(view)
        else:
            digested = self._digesting.submit(self._digest.update, view)
        try:
            while done < len(view):
                written = super().write(view[done : done + SYNC_BYTES - self._waiting])
                done += written
                self._waiting += written
                if self._waiting == SYNC_BYTES:
                    os.fdatasync(self.fileno())
                    self._waiting = 0
        except OSError as error:
            self.problem = self.problem or error
            raise
        finally:
            # The caller may change the bytes now.
            if digested is not None:
                digested.result()
        return done

    def close(self) -> None:
        """Closes the file and ends the thread that computes the digest."""
        self._digesting.shutdown()
        super().close()


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], moved: Callable[[int], None]
) -> None:
    """Writes and syncs tensors of main memory as safetensors; `moved` gets each write's bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        kind = _SAFETENSORS_TYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    encoded = encoded.ljust(-(-len(encoded) // 8) * 8)
    with SyncedFile(path, moved) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.flatten().view(torch.uint8).numpy())
        os.fsync(file.fileno())
