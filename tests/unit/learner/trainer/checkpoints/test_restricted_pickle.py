"""The index of a checkpoint is read without running any code in it."""

import random
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints.restricted_pickle import read_index  # noqa: E402
from support.rigs.fuzz_budget import times  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter, save  # noqa: E402


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle, protocol 0, that calls a function as it is loaded."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "__import__"),
        ("torch.distributed.checkpoint.filesystem", "os"),
    ],
)
def test_a_call_is_refused_before_it_happens(tmp_path: Path, module: str, name: str) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / ".metadata"
    path.write_bytes(call(module, name, f"touch {canary}"))
    with pytest.raises(CheckpointError, match=f"{module}.{name} has no place in the index"):
        read_index(path)
    assert not canary.exists()


def attribute(module: str, name: str, attribute: str) -> bytes:
    """A pickle that gets an attribute, as Python 3.11.2 writes members of enums."""
    return f"cbuiltins\ngetattr\n(c{module}\n{name}\nV{attribute}\ntR.".encode()


def test_members_of_enums_are_read_as_any_python_writes_them(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    enum = "torch.distributed.checkpoint.planner", "WriteItemType"
    path.write_bytes(attribute(*enum, "TENSOR"))
    with pytest.raises(CheckpointError, match="holds a WriteItemType, not the index"):
        read_index(path)
    path.write_bytes(attribute(*enum, "mro"))
    with pytest.raises(CheckpointError, match="cannot be read: 'mro'"):
        read_index(path)


def test_attributes_of_anything_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(attribute("torch.distributed.checkpoint.metadata", "Metadata", "__init__"))
    with pytest.raises(CheckpointError, match="builtins.getattr has no place in the index"):
        read_index(path)


def test_a_plain_value_is_no_index(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(b"I1\n.")
    with pytest.raises(CheckpointError, match="holds a int, not the index"):
        read_index(path)


@pytest.mark.parametrize("data", [b"", b"\x80\x05", struct.pack("<q", 7)])
def test_a_torn_index_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_index(path)


def test_an_index_of_torchs_own_writer_is_read(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.bfloat16), "b": {"c": torch.zeros(2, 2)}, "n": 3}
    with pytest.warns(UserWarning, match="save in a single process"):
        save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    index = read_index(tmp_path / ".metadata")
    assert set(index.state_dict_metadata) == {"a", "b.c", "n"}
    assert index.state_dict_metadata["b.c"].size == torch.Size([2, 2])


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes with a few others in their place, a block of zeros, a gap or no end."""
    draw = random.Random(seed)
    place = draw.randrange(len(data))
    return [
        data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :],
        data[:place] + bytes(64) + data[place + 64 :],
        data[:place] + data[place + draw.randint(1, 9) :],
        data[:place],
    ][seed % 4]


def test_a_damaged_index_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.bfloat16), "b": {"c": torch.zeros(2, 2)}, "n": 3}
    with pytest.warns(UserWarning, match="save in a single process"):
        save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    refused = 0
    for seed in range(times(4000)):
        path.write_bytes(damaged(data, seed))
        try:
            read_index(path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(path) in str(error)
    assert refused > times(1000)
