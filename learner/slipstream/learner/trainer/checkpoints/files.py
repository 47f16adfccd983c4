"""Files that count the bytes of each read and write: a slow disk moves some, a dead one none."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from slipstream.protocol.checkpoints import DIGEST_BYTES
from torch import Tensor

# Most bytes of one system call.
PIECE_BYTES = 8 << 20
# Most bytes of a file that wait in main memory for the disk.
SYNC_BYTES = 32 << 20
# Fewer bytes are digested sooner than a thread is asked to; torch writes thousands of such pieces.
_THREAD_BYTES = 64 << 10
_SAFETENSORS_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


class CountedFile(io.FileIO):
    """A file without a buffer; wrap it in `io.BufferedReader` or `io.BufferedWriter`."""

    def __init__(self, path: Path, mode: str, moved: Callable[[int], None]) -> None:
        """Calls `moved` with the number of bytes of each read and write, in the caller's thread."""
        self._moved = moved
        super().__init__(path, mode)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Reads at most `PIECE_BYTES`."""
        count: int = super().readinto(memoryview(buffer).cast("B")[:PIECE_BYTES]) or 0
        self._moved(count)
        return count

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Writes at most `PIECE_BYTES`; returns how many bytes the file has taken."""
        count: int = super().write(memoryview(data).cast("B")[:PIECE_BYTES])
        self._moved(count)
        return count


class SyncedFile(CountedFile):
    """A file that is synced while it is written; a second thread computes its digest meanwhile.

    Without these syncs all bytes would go to the disk at the end. Other syncs at that time, for
    example of the controller's journal on the same disk, would wait for all of them.
    """

    def __init__(
        self,
        path: Path,
        moved: Callable[[int], None],
        *,
        sync_bytes: int = SYNC_BYTES,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        self._sync_bytes, self._sync = sync_bytes, sync
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._digesting = ThreadPoolExecutor(1, "checkpoint-digest")
        self._waiting = 0
        # The error with which the disk refused a write.
        self.problem: OSError | None = None
        super().__init__(path, "wb", moved)

    @property
    def digest(self) -> str:
        """The BLAKE2b digest of all written bytes, in hexadecimal."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Writes all of `data`, and returns its number of bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            part = view[done : done + self._sync_bytes - self._waiting]
            digested = None
            if len(part) < _THREAD_BYTES:
                self._digest.update(part)
            else:
                digested = self._digesting.submit(self._digest.update, part)
            try:
                self._write(part)
            except OSError as error:
                self.problem = self.problem or error
                raise
            if digested is not None:
                digested.result()
            done += len(part)
        return done

    def close(self) -> None:
        """Closes the file and ends the digest's thread."""
        self._digesting.shutdown()
        super().close()

    def _write(self, part: memoryview) -> None:
        written = 0
        while written < len(part):
            written += super().write(part[written:])
        self._waiting += written
        if self._waiting == self._sync_bytes:
            self._sync(self.fileno())
            self._waiting = 0


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], moved: Callable[[int], None]
) -> None:
    """Writes contiguous tensors in main memory, durably, in the format of safetensors.

    `safetensors.torch.save_file` reports no progress, and may take hours on a slow disk.
    """
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
