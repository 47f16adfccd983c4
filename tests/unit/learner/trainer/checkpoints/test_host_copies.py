"""Memory that the tensors of a save are copied to: nothing is lost, nothing is taken twice."""

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from slipstream.learner.trainer.checkpoints import host_copies  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402

CPU = torch.device("cpu")


def tensors_of(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(300, generator=random),
        torch.randn(33, 65, generator=random).to(torch.bfloat16),
        torch.empty(0, 7),
        torch.tensor(float(seed)),
        # A view across its memory, and one tensor that is larger than a block.
        torch.randn(20, 40, generator=random).t(),
        torch.arange(seed, seed + 3000),
        torch.randn(6, generator=random) > 0,
    ]


def test_copies_are_equal_and_hold_no_bytes_but_their_own() -> None:
    tensors = tensors_of(1)
    copies = HostCopies(CPU).copy(tensors)
    for tensor, copied in zip(tensors, copies, strict=True):
        assert copied.dtype == tensor.dtype
        assert torch.equal(copied, tensor)
        # torch.save writes all of it.
        assert copied.untyped_storage().nbytes() == tensor.nbytes
    file = io.BytesIO()
    torch.save(copies[0], file)
    assert len(file.getvalue()) < tensors[0].nbytes + 2000


def test_the_next_copies_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    take = host_copies.mmap.mmap

    def noted(place: int, size: int, **named: int) -> Any:
        sizes.append(size)
        return take(place, size, **named)

    monkeypatch.setattr(host_copies.mmap, "mmap", noted)
    host = HostCopies(CPU)
    first = host.copy(tensors_of(1))
    # A single block has room for all.
    assert len(sizes) == 1
    host.begin()
    second = host.copy(tensors_of(2))
    assert len(sizes) == 1
    for tensor, copied in zip(tensors_of(2), second, strict=True):
        assert torch.equal(copied, tensor)
    # Both copies lie in the same memory.
    assert torch.equal(first[0], second[0])


def test_a_save_hears_that_there_is_too_little_memory(monkeypatch):
    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_copies.mmap, "mmap", none)
    with pytest.raises(
        host_copies.CheckpointError, match="no 24064 bytes of main memory for a c"
    ):
        HostCopies(CPU).copy(tensors_of(1)[5:6])
