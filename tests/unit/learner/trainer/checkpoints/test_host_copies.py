"""Memory that the tensors of a save are copied to: nothing is lost, nothing is taken twice."""

import io

import pytest

torch = pytest.importorskip("torch")

from slipstream.learner.trainer.checkpoints import host_copies  # noqa: E402
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the blocks that were taken."""
    sizes: list[int] = []
    whole = host_copies._Block.__init__

    def noted(block: host_copies._Block, num_bytes: int, device: torch.device) -> None:
        sizes.append(num_bytes)
        whole(block, num_bytes, device)

    monkeypatch.setattr(host_copies._Block, "__init__", noted)
    return sizes


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


def test_the_next_copies_take_no_more_memory(taken: list[int]) -> None:
    host = HostCopies(CPU)
    first = host.copy(tensors_of(1))
    before = list(taken)
    # The largest block is the last tensor but one, which fills a block of its own.
    assert max(before) == 24064
    host.begin()
    second = host.copy(tensors_of(2))
    assert taken == before
    for tensor, copied in zip(tensors_of(2), second, strict=True):
        assert torch.equal(copied, tensor)
    # Both copies lie in the same memory.
    assert torch.equal(first[0], second[0])


def test_what_was_reserved_is_enough_in_any_order(taken: list[int]) -> None:
    host = HostCopies(CPU)
    # Each parameter is reserved beside its states, but parameters and states are copied in turn.
    weights = [torch.randn(size).to(torch.bfloat16) for size in (9000, 70, 3000, 200, 9000, 40)]
    states = [weight.float() for weight in weights]
    host.reserve([t.nbytes for pair in zip(weights, states, strict=True) for t in pair])
    host.begin()
    before = list(taken)
    tensors = [*weights[::-1], *states]
    for tensor, copied in zip(tensors, host.copy(tensors), strict=True):
        assert torch.equal(copied, tensor)
    assert taken == before


def test_a_save_hears_that_memory_could_not_be_reserved(monkeypatch, caplog):
    monkeypatch.setattr(host_copies.mmap, "mmap", _no_memory)
    host = HostCopies(CPU)
    host.reserve([10_000])
    with pytest.raises(host_copies.CheckpointError, match="no 10240 bytes of main memory for a c"):
        host.begin()
    assert "no 10240 bytes of main memory" in caplog.text
    # The next save asks for itself.
    host.begin()
    with pytest.raises(host_copies.CheckpointError, match="no 24064 bytes"):
        host.copy(tensors_of(1)[5:6])


def _no_memory(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")
