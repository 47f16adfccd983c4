"""Operations of clients on the disk: requests before they begin, results before they are told.

Consumes: operations and results. Produces: files, and all of them again, after a restart and for a
reader beside the writer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message
from slipstream.core.configuration.config_file import REMEDY
from slipstream.core.errors import ProtocolError
from slipstream.core.machine.files import replace_file
from slipstream.protocol.bounds import check_known
from slipstream.v1 import operations_pb2 as pb

M = TypeVar("M", bound=Message)
# Number of an operation, the operation, its result, which is not done before it has ended, and the
# end in seconds since 1970.
Stored: TypeAlias = tuple[int, pb.Operation, pb.OperationResult, float]


class OperationStore:
    """The operations of a run, in the order in which they came; every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def clean(self) -> None:
        """Removes what a kill has cut: requests that are not whole, and results without one."""
        for path in self._folder.glob("*"):
            if path.name.startswith(".") or not path.with_suffix(".request").exists():
                path.unlink()

    def read(self, *, only_ended: bool = False) -> Iterator[Stored]:
        """Yields operations in the order of their numbers, but for those that go meanwhile.

        Raises ProtocolError, as `result` does, for a file that is damaged or of another release.
        """
        for path in sorted(self._folder.glob("[0-9]*.request")):
            result = pb.OperationResult()
            ended_s = 0.0
            with contextlib.suppress(FileNotFoundError):
                ended_s = path.with_suffix(".result").stat().st_mtime
                result = self.result(int(path.stem))
            if ended_s or not only_ended:
                with contextlib.suppress(FileNotFoundError):
                    operation = _read(pb.Operation, path)
                    yield int(path.stem), operation, result, ended_s

    def result(self, number: int) -> pb.OperationResult:
        """Returns the result of an operation that has ended."""
        return _read(pb.OperationResult, self._folder / f"{number:09d}.result")

    def write(self, number: int, operation: pb.Operation) -> None:
        """Writes an operation, in place of an earlier one of this number."""
        replace_file(self._folder / f"{number:09d}.request", operation.SerializeToString())

    def end(self, number: int, result: pb.OperationResult) -> None:
        """Writes the result of an operation."""
        replace_file(self._folder / f"{number:09d}.result", result.SerializeToString())

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes operations that have ended, with their results."""
        for number in numbers:
            path = self._folder / f"{number:09d}.request"
            # Without its result it would begin again.
            path.unlink()
            path.with_suffix(".result").unlink()


def _read(kind: type[M], path: Path) -> M:
    try:
        message = kind.FromString(path.read_bytes())
    except DecodeError as error:
        raise ProtocolError(f"{path} is damaged: {error}; {REMEDY}") from error
    check_known(message, str(path))
    return message
