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
from slipstream.core.file_manifest import ManifestedFolder
from slipstream.protocol.bounds import check_known
from slipstream.v1 import operations_pb2 as pb

M = TypeVar("M", bound=Message)
# Number of an operation, the operation, its result, which is not done before it has ended, and the
# end in seconds since 1970.
Stored: TypeAlias = tuple[int, pb.Operation, pb.OperationResult, float]


class StoredOperations:
    """The operations of a run, for a reader beside their writer; all methods block on the disk."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, which need not be there yet."""
        self._folder = folder

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
                    operation = self._message(pb.Operation, path.name)
                    yield int(path.stem), operation, result, ended_s

    def result(self, number: int) -> pb.OperationResult:
        """Returns the result of an operation that has ended."""
        return self._message(pb.OperationResult, _result_name(number))

    def _message(self, kind: type[M], name: str) -> M:
        path = self._folder / name
        try:
            message = kind.FromString(self._bytes(name))
        except DecodeError as error:
            raise ProtocolError(f"{path} is damaged: {error}; {REMEDY}") from error
        check_known(message, str(path))
        return message

    def _bytes(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()


class OperationStore(StoredOperations):
    """The operations of a run, for their only writer: each file has its digest in a manifest."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, which is made if it is missing."""
        super().__init__(folder)
        self._files = ManifestedFolder(folder)
        # A release without the manifest may have left results whose requests it had removed.
        results = sorted(folder.glob("*.result"))
        lone = [path.name for path in results if not path.with_suffix(".request").exists()]
        self._files.remove(lone)

    def write(self, number: int, operation: pb.Operation) -> None:
        """Writes an operation, in place of an earlier one of this number."""
        self._files.write(_request_name(number), operation.SerializeToString())

    def end(self, number: int, result: pb.OperationResult) -> None:
        """Writes the result of an operation."""
        self._files.write(_result_name(number), result.SerializeToString())

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes operations that have ended, with their results."""
        names: list[str] = []
        for number in numbers:
            # Without its result an operation would begin again.
            names += [_request_name(number), _result_name(number)]
        self._files.remove(names)

    def close(self) -> None:
        """Ends the writes; `write`, `end` and `remove` raise ProtocolError from then on."""
        self._files.close()

    def _bytes(self, name: str) -> bytes:
        return self._files.read(name)


def _request_name(number: int) -> str:
    return f"{number:09d}.request"


def _result_name(number: int) -> str:
    return f"{number:09d}.result"
