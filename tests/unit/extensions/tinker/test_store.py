"""Operations on the disk that another release, or nobody, can have written so."""

from pathlib import Path

import pytest
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.extensions.tinker.operation_store import (
    OperationStore,
    StoredOperations,
)
from slipstream.v1 import operations_pb2 as pb

# Field 1999, of no message here, with the number 7.
UNKNOWN = b"\xf8\x7c\x07"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "operations"
    store = OperationStore(folder)
    store.write(1, pb.Operation(id="first"))
    store.end(1, pb.OperationResult(is_done=True))
    return folder


@pytest.mark.parametrize("kind", [OperationStore, StoredOperations])
def test_an_operation_is_read_as_it_was_written(
    folder: Path, kind: type[OperationStore] | type[StoredOperations]
) -> None:
    ((number, operation, result, _),) = kind(folder).read()
    assert (number, operation.id, result.is_done) == (1, "first", True)


@pytest.mark.parametrize("name", ["000000001.request", "000000001.result"])
@pytest.mark.parametrize(
    ("more", "cause"),
    [(UNKNOWN, "is of another release: a field"), (b"\xff", "is damaged: ")],
)
def test_a_stored_operation_is_read_whole_or_not_at_all(
    folder: Path, name: str, more: bytes, cause: str
) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ProtocolError, match=f"{name} {cause}"):
        list(StoredOperations(folder).read())
    with pytest.raises(
        ProtocolError, match=f"{name} is not what the run wrote, by its line in"
    ):
        OperationStore(folder)


def test_a_result_whose_request_an_earlier_release_removed_goes(folder: Path) -> None:
    (folder / "manifest.jsonl").unlink()
    (folder / "000000001.request").unlink()
    assert list(OperationStore(folder).read()) == []
    assert [path.name for path in folder.iterdir()] == ["manifest.jsonl"]


def test_spent_operations_go_with_their_results(folder: Path) -> None:
    store = OperationStore(folder)
    store.remove([1])
    assert list(OperationStore(folder).read()) == []
    assert [path.name for path in folder.iterdir()] == ["manifest.jsonl"]


def test_the_unknown_field_of_these_tests_can_be_read() -> None:
    message: Message = pb.Operation.FromString(UNKNOWN)
    assert message.ByteSize() == len(UNKNOWN)
