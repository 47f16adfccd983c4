"""Model and optimizer state in host memory while nobody works with it.

What moves is the storage under the tensors: it is copied to the host and resized to nothing, and
later resized and filled again. So every view of it, and Megatron's flat buffers are full of views,
is the same tensor afterwards; replacing `tensor.data` would cut views off their buffer, and the
optimizer would go on updating a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from slipstream.learner.trainer.model.settings import Megatron
from slipstream.protocol.errors import UntrainableBatch
from slipstream.protocol.settings.config import OffloadSection
from torch import Tensor


class Part(Enum):
    """What can be away."""

    PARAMETERS = "parameters"
    # Needed from one `zero_grad` to the optimizer's step: they are forgotten rather than kept.
    GRADIENTS = "gradients"
    # Moments and master weights.
    OPTIMIZER = "optimizer"


@dataclass
class _Away:
    """The storages of a part that are resized to nothing, with their sizes in bytes."""

    storages: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    # The bytes of each, None for a part that is not kept.
    copies: list[Tensor | None] = field(default_factory=list)


class HostMemory:
    """Brings parts to the device for those who work with them, and to the host afterwards."""

    def __init__(self, settings: OffloadSection) -> None:
        self._is_offloaded = {part: bool(getattr(settings, part.value)) for part in Part}
        self._tensors: dict[Part, Callable[[], Iterable[Tensor]]] = {}
        self._users = dict.fromkeys(Part, 0)
        self._away: dict[Part, _Away] = {}

    def own(self, tensors: Mapping[Part, Callable[[], Iterable[Tensor]]]) -> None:
        """Says what the parts are; asked each time, for an optimizer's state comes and goes."""
        self._tensors.update(tensors)

    @contextlib.contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """The parts are on the device inside; those that are set to, leave with the last user.

        Without an `own` of it a part is nothing. What raises leaves everything where it is, but
        for a batch that cannot be trained: training goes on after it.
        """
        for part in parts:
            self._users[part] += 1
            self._bring(part)
        try:
            yield
        except UntrainableBatch:
            self._leave(parts)
            raise
        self._leave(parts)

    def _leave(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._users[part] -= 1
            if not self._users[part] and self._is_offloaded[part] and part in self._tensors:
                self._send(part)

    def _send(self, part: Part) -> None:
        away = _Away()
        for storage in _storages(self._tensors[part]()):
            away.storages.append((storage, storage.nbytes()))
            kept = part is not Part.GRADIENTS
            away.copies.append(_to_host(_bytes(storage)) if kept else None)
            storage.resize_(0)
        self._away[part] = away
        if torch.cuda.is_available():
            # Else the memory stays with this process, and no other one can use it.
            torch.cuda.empty_cache()

    def _bring(self, part: Part) -> None:
        away = self._away.pop(part, None)
        if away is None:
            return
        for (storage, size), copy in zip(away.storages, away.copies, strict=True):
            storage.resize_(size)
            if copy is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(copy)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, those on the host already left out where there is a device."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and (storage.is_cuda or not torch.cuda.is_available()):
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(data: Tensor) -> Tensor:
    if not data.is_cuda:
        return data.clone()
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    return host.copy_(data)


def parameters(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Of all chunks, frozen ones too."""
    for chunk in chunks:
        yield from chunk.parameters()


def gradient_buffers(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """The flat buffers of which every gradient is a part."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Moments and master weights; parameters of the model that it updates directly are not its."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in parameters(chunks)}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in theirs)
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
