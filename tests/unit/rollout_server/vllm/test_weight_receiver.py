"""What a worker's receiver keeps of an update that went through vLLM's loader."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.rollout_server.vllm import weight_receiver
from slipstream.rollout_server.vllm.weight_receiver import SlipstreamWeightTransfer
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Update
from slipstream.rollout_server.weights.copy_plan import Copy, View
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import reload

NUM_ELEMENTS = 8
GIB = 1 << 30
BUCKETS = plan_buckets([TensorSpec("weight", "bfloat16", (1, NUM_ELEMENTS))], 1 << 10)


class Negating(torch.nn.Linear):
    """A model whose loader does more than a copy."""

    def __init__(self) -> None:
        super().__init__(NUM_ELEMENTS, 1, bias=False, dtype=torch.bfloat16)
        self.weight.weight_loader = _load_negative
        reload.record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the negative of each tensor."""
        for _, tensor in weights:
            self.weight.weight_loader(self.weight, tensor)
        return {"weight"}


def _load_negative(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(-loaded_weight)


class OneBucket:
    """A transport that sends one bucket of ones; `sent` tells whether its memory is still held."""

    sent: weakref.ref[torch.Tensor]

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        return []

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        buffer = torch.ones(BUCKETS[0].num_bytes // 2, dtype=torch.bfloat16).view(
            torch.uint8
        )
        self.sent = weakref.ref(buffer)
        yield buffer

    def digests(self) -> Sequence[bytes]:
        return [b"digest"]

    def take_wire(self) -> Wire:
        return Wire()


def test_an_update_that_disproved_the_plan_leaves_no_bucket_in_memory() -> None:
    model = Negating()
    sender = OneBucket()
    place = View.of(model.weight)
    copies = (Copy(torch.bfloat16, place, "weight", place),)
    receiver = SlipstreamWeightTransfer(None, VllmConfig(), torch.device("cpu"), model)
    receiver._weights = tuple(BUCKETS)
    incoming = Incoming(tuple(BUCKETS), 1.0, own_buffers=True)
    receiver._update = Update(incoming, None, receiver._take, receiver.device)
    receiver._update.prepare(sender)
    receiver._plan = (copies,)
    receiver.runner = SimpleNamespace(reset_lora_state=lambda: None)
    result = receiver.receive()
    assert torch.equal(model.weight, torch.full_like(model.weight, -1))
    assert (result["by_plan"], result["has_plan"]) == (False, False)
    assert result["digests"] == [b"digest".hex()]
    assert sender.sent() is None


def test_workers_on_a_cpu_share_what_main_memory_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_receiver, "free_memory", lambda: (5 * GIB, 20 * GIB))

    def room(held_bytes: int, num_workers: int) -> int:
        settings = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=num_workers)
        )
        receiver = SlipstreamWeightTransfer(None, settings, torch.device("cpu"), None)
        receiver._staging = SimpleNamespace(held_bytes=held_bytes)
        return receiver.room()

    assert room(0, 1) == 3 * GIB
    assert room(0, 2) == 3 * GIB // 2
    # Memory that is kept already is used again.
    assert room(GIB, 2) == 3 * GIB // 2 + GIB
