"""Operations of clients on the disk: requests before they begin, results before they are told.

Consumes: operations and results. Produces: files, and all of them again after a restart.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from google.protobuf.message import Message
from slipstream.protocol.checkpoints import sync_folder
from slipstream.v1 import operations_pb2 as pb

Ended: TypeAlias = tuple[float, pb.Operation, pb.OperationResult]


class OperationStore:
    """The operations of a run, in the order in which they came; every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def read(self) -> Iterator[tuple[int, pb.Operation, pb.OperationResult]]:
        """Yields number, operation and result of each; the result is not done if there is none."""
        for path in self._folder.glob("*.result"):
            # A kill came between its request and this.
            if not path.with_suffix(".request").exists():
                path.unlink()
        for path in self._folder.glob(".*.request"):
            # A kill came before it was whole.
            path.unlink()
        for path in sorted(self._folder.glob("*.request")):
            has_ended = path.with_suffix(".result").exists()
            result = self.result(int(path.stem)) if has_ended else pb.OperationResult()
            yield int(path.stem), pb.Operation.FromString(path.read_bytes()), result

    def result(self, number: int) -> pb.OperationResult:
        """Returns the result of an operation that has ended."""
        path = self._folder / f"{number:09d}.result"
        return pb.OperationResult.FromString(path.read_bytes())

    def write(self, number: int, operation: pb.Operation) -> None:
        """Writes an operation, in place of an earlier one of this number."""
        self._write(f"{number:09d}.request", operation)

    def end(self, number: int, result: pb.OperationResult) -> None:
        """Writes the result of an operation."""
        self._write(f"{number:09d}.result", result)

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes operations that have ended, with their results."""
        for number in numbers:
            path = self._folder / f"{number:09d}.request"
            # Without its result it would begin again.
            path.unlink()
            path.with_suffix(".result").unlink()

    @staticmethod
    def read_ended(folder: Path, known: dict[str, Ended]) -> None:
        """Brings what a reader beside the writer has `known` of ended operations up to date.

        By the name of its file each has when it ended, and operation and result without tensors.
        """
        names = {path.name for path in folder.glob("[0-9]*.result")}
        for gone in known.keys() - names:
            del known[gone]
        for name in sorted(names - known.keys()):
            path = folder / name
            with contextlib.suppress(FileNotFoundError):
                operation = pb.Operation.FromString(path.with_suffix(".request").read_bytes())
                result = pb.OperationResult.FromString(path.read_bytes())
                if operation.HasField("compute"):
                    operation.compute.ClearField("sequences")
                    result.compute.ClearField("logprobs")
                known[name] = path.stat().st_mtime, operation, result

    def _write(self, name: str, message: Message) -> None:
        path = self._folder / name
        partial = path.with_name(f".{name}")
        with partial.open("wb") as file:
            file.write(message.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_folder(self._folder)
