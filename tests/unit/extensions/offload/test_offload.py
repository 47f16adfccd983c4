import pytest
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.sections import OffloadSection
from slipstream.extensions.offload.trainer import HostMemory
from slipstream.learner.trainer.model.model import MemoryPart


def offloaded(part: MemoryPart) -> tuple[HostMemory, torch.Tensor]:
    """Memory of which one part leaves, and its tensor of three ones."""
    memory = HostMemory(OffloadSection(**{part.value: True}))
    tensor = torch.ones(3)
    memory.own({part: lambda: [tensor]})
    return memory, tensor


def test_views_of_a_buffer_see_it_again_after_it_was_away() -> None:
    buffer = torch.arange(6.0)
    parameter = torch.nn.Parameter(buffer[2:4])
    memory = HostMemory(OffloadSection(parameters=True))
    memory.own({MemoryPart.PARAMETERS: lambda: [parameter, buffer[:2]]})
    with memory.resident(MemoryPart.PARAMETERS):
        pass
    assert buffer.untyped_storage().nbytes() == 0
    with memory.resident(MemoryPart.PARAMETERS):
        assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
        with torch.no_grad():
            parameter.fill_(9.0)
        assert buffer.tolist() == [0, 1, 9, 9, 4, 5]
    with memory.resident(MemoryPart.PARAMETERS):
        assert parameter.tolist() == [9, 9]


def test_part_leaves_with_the_last_of_its_users() -> None:
    memory, weight = offloaded(MemoryPart.PARAMETERS)
    with memory.resident(MemoryPart.PARAMETERS):
        with memory.resident(MemoryPart.PARAMETERS):
            pass
        assert weight.tolist() == [1, 1, 1]
    assert weight.untyped_storage().nbytes() == 0


def test_only_the_parts_that_are_set_leave() -> None:
    weight = torch.ones(3)
    moment = torch.ones(4)
    memory = HostMemory(OffloadSection(optimizer=True, gradients=True))
    memory.own(
        {
            MemoryPart.PARAMETERS: lambda: [weight],
            MemoryPart.OPTIMIZER: lambda: [moment],
        }
    )
    with memory.resident(*MemoryPart):
        pass
    assert weight.untyped_storage().nbytes() == 12
    assert moment.untyped_storage().nbytes() == 0


def test_gradients_come_back_as_zeros() -> None:
    memory, gradients = offloaded(MemoryPart.GRADIENTS)
    with memory.resident(MemoryPart.GRADIENTS):
        pass
    with memory.resident(MemoryPart.GRADIENTS):
        assert gradients.tolist() == [0, 0, 0]


def test_failure_inside_leaves_the_memory_for_who_looks_into_it() -> None:
    memory, weight = offloaded(MemoryPart.PARAMETERS)
    with pytest.raises(ValueError, match="why"), memory.resident(MemoryPart.PARAMETERS):
        raise ValueError("why")
    assert weight.tolist() == [1, 1, 1]


def test_a_batch_that_cannot_be_trained_leaves_the_memory_to_others() -> None:
    memory, weight = offloaded(MemoryPart.PARAMETERS)
    with (
        pytest.raises(UntrainableBatch),
        memory.resident(MemoryPart.PARAMETERS),
        memory.resident(MemoryPart.PARAMETERS),
    ):
        raise UntrainableBatch("the loss is nan")
    assert weight.untyped_storage().nbytes() == 0
    with memory.resident(MemoryPart.PARAMETERS):
        assert weight.tolist() == [1, 1, 1]
