"""Operations on the disk that another release, or nobody, can have written so."""

from pathlib import Path

import pytest
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.extensions.tinker.store import OperationStore
from slipstream.v1 import operations_pb2 as pb

# Field 1999, of no message here, with the number 7.
UNKNOWN = b"\xf8\x7c\x07"


@pytest.fixture
def store(tmp_path: Path) -> OperationStore:
    store = OperationStore(tmp_path / "operations")
    store.write(1, pb.Operation(id="first"))
    store.end(1, pb.OperationResult(is_done=True))
    return store


def test_an_operation_is_read_as_it_was_written(store: OperationStore) -> None:
    ((number, operation, result, _),) = store.read()
    assert (number, operation.id, result.is_done) == (1, "first", True)


@pytest.mark.parametrize("name", ["000000001.request", "000000001.result"])
@pytest.mark.parametrize(
    ("more", "cause"), [(UNKNOWN, "is of another release: a field"), (b"\xff", "is damaged: ")]
)
def test_a_stored_operation_is_read_whole_or_not_at_all(
    store: OperationStore, tmp_path: Path, name: str, more: bytes, cause: str
) -> None:
    path = tmp_path / "operations" / name
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ProtocolError, match=f"{name} {cause}"):
        list(store.read())


def test_the_unknown_field_of_these_tests_can_be_read() -> None:
    message: Message = pb.Operation.FromString(UNKNOWN)
    assert message.ByteSize() == len(UNKNOWN)
