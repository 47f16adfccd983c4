"""The parts of a model's memory, and who uses them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from slipstream.learner.trainer import Megatron
from torch import Tensor


class Part(Enum):
    """A part of a model that need not be on the device all the time."""

    PARAMETERS = "parameters"
    # Gradients are needed from `zero_grad` to the optimizer's step only: they are dropped, not
    # copied.
    GRADIENTS = "gradients"
    # Moments and master weights.
    OPTIMIZER = "optimizer"


class DeviceMemory:
    """Keeps all parts of a model on the device; `HostMemory` moves unused ones away."""

    def own(self, tensors: Mapping[Part, Callable[[], Iterable[Tensor]]]) -> None:
        """Takes for each part a function that returns the part's tensors, which may be replaced."""

    def offloads(self, part: Part) -> bool:
        """Whether `part` moves to host memory when it is not in use."""
        return False

    def resident(self, *parts: Part) -> AbstractContextManager[None]:
        """Returns a context in which `parts` are on the device."""
        return nullcontext()

    def settle(self) -> None:
        """Moves parts to where they are while nothing uses them, before any use."""


def parameters(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the parameters of all chunks, including frozen ones."""
    for chunk in chunks:
        yield from chunk.parameters()


def gradient_buffers(chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the flat buffers whose views are the gradients."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the optimizer's moments and master weights."""
    yield from master_weights(optimizer, chunks)
    for part in optimizer.chained_optimizers:
        for state in () if part.is_stub_optimizer else part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def master_weights(optimizer: Megatron, chunks: Sequence[Megatron]) -> Iterator[Tensor]:
    """Yields the tensors that the optimizer updates, except those that are model parameters."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in parameters(chunks)}
    for part in optimizer.chained_optimizers:
        for group in () if part.is_stub_optimizer else part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in theirs)
