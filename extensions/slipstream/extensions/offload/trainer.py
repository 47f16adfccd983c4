"""Keeps model and optimizer state in host memory while no computation needs this state.

The storages of the tensors are moved: a storage is copied to the host and resized to 0, and later
resized and filled again. Every view of the storage stays valid, and Megatron's flat buffers have
many views. Replacing `tensor.data` would separate views from their buffer, and the optimizer would
update a copy.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import OffloadSection
from slipstream.learner.trainer.model.model import DeviceMemory, MemoryPart
from slipstream.learner.trainer.model.model_part import ModelPart
from torch import Tensor

# A storage on the host: its size in bytes on the device, and its contents, None if dropped.
_Away = tuple[torch.UntypedStorage, int, Tensor | None]


class HostMemory(DeviceMemory):
    """Moves a model's parts to the device while they are used, and back to the host afterwards.

    `own` sets each part's tensors, once. Code that uses parts runs inside `resident`, which may be
    nested; after the last use, the parts that `settings` offloads move to the host.
    """

    def __init__(self, settings: OffloadSection) -> None:
        self._is_offloaded = {part: bool(getattr(settings, part.value)) for part in MemoryPart}
        self._tensors: dict[MemoryPart, Callable[[], Iterable[Tensor]]] = {}
        self._users = dict.fromkeys(MemoryPart, 0)
        self._away: dict[MemoryPart, list[_Away]] = {}

    def own(self, tensors: Mapping[MemoryPart, Callable[[], Iterable[Tensor]]]) -> None:
        self._tensors.update(tensors)

    def offloads(self, part: MemoryPart) -> bool:
        return self._is_offloaded[part]

    @contextlib.contextmanager
    def resident(self, *parts: MemoryPart) -> Iterator[None]:
        """Keeps `parts` on the device inside the context; after their last use they are offloaded.

        A part that `own` has not set is ignored. UntrainableBatch counts as a normal end, because
        training goes on with another batch. After any other exception the parts stay on the device.
        """
        for part in parts:
            self._users[part] += 1
            for storage, size, copy in self._away.pop(part, ()):
                storage.resize_(size)
                if copy is None:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(copy)
        try:
            yield
        except UntrainableBatch:
            self._leave(parts)
            raise
        self._leave(parts)

    def _leave(self, parts: Sequence[MemoryPart]) -> None:
        for part in parts:
            self._users[part] -= 1
            if not self._users[part] and self._is_offloaded[part] and part in self._tensors:
                self._send(part)

    def _send(self, part: MemoryPart) -> None:
        away = self._away[part] = list[_Away]()
        for storage in _storages(self._tensors[part]()):
            size = storage.nbytes()
            copy = None
            data = _bytes(storage)
            if part is not MemoryPart.GRADIENTS:
                copy = torch.empty_like(data, device="cpu", pin_memory=data.is_cuda).copy_(data)
            away.append((storage, size, copy))
            storage.resize_(0)
        if torch.cuda.is_available():
            # Without this call the memory stays with this process, and no other process can use it.
            torch.cuda.empty_cache()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Returns the storages of `tensors` without duplicates; with a GPU, only those on a device."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and (storage.is_cuda or not torch.cuda.is_available()):
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadPart(ModelPart):
    """Lets the tensors of a model leave the device."""

    def __init__(self, config: Config) -> None:
        self._settings = config.learner.offload

    def memory(self) -> HostMemory:
        return HostMemory(self._settings)
