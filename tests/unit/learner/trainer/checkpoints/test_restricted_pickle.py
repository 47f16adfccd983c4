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
def test_a_call_is_refused_before_it_happens(
    tmp_path: Path, module: str, name: str
) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / ".metadata"
    path.write_bytes(call(module, name, f"touch {canary}"))
    with pytest.raises(
        CheckpointError, match=f"{module}.{name} has no place in the index"
    ):
        read_index(path)
    assert not canary.exists()


def attribute(module: str, name: str, attribute: str) -> bytes:
    """A pickle that gets an attribute, as Python 3.11.2 writes members of enums."""
    return f"cbuiltins\ngetattr\n(c{module}\n{name}\nV{attribute}\ntR.".encode()


ENUM = "torch.distributed.checkpoint.planner", "WriteItemType"
METADATA = "torch.distributed.checkpoint.metadata", "Metadata"


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        # Members of enums are read as any Python writes them.
        (attribute(*ENUM, "TENSOR"), "holds a WriteItemType, not the index"),
        (attribute(*ENUM, "mro"), "cannot be read: 'mro'"),
        (
            attribute(*METADATA, "__init__"),
            "builtins.getattr has no place in the index",
        ),
        (b"I1\n.", "holds a int, not the index"),
        (b"", "cannot be read"),
        (b"\x80\x05", "cannot be read"),
        (struct.pack("<q", 7), "cannot be read"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, data: bytes, cause: str) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=cause):
        read_index(path)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """An index of torch's own writer."""
    state = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": {"c": torch.zeros(2, 2)},
        "n": 3,
    }
    with pytest.warns(UserWarning, match="save in a single process"):
        save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path / ".metadata"


def test_an_index_of_torchs_own_writer_is_read(written: Path) -> None:
    index = read_index(written)
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


def test_a_damaged_index_is_read_or_refused_in_one_line(written: Path) -> None:
    data = written.read_bytes()
    refused = 0
    for seed in range(times(4000)):
        written.write_bytes(damaged(data, seed))
        try:
            read_index(written)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(written) in str(error)
    assert refused > times(1000)
