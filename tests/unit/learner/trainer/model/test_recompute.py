"""How many layers recompute their activations, and that the plan is made of what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slipstream.core.settings.sections import LearnerSection, ParallelSection
from slipstream.learner.trainer.model import recompute
from slipstream.learner.trainer.model.recompute import (
    Recompute,
    in_flight,
    memory_limit,
    recomputed_layers,
)
from torch import Tensor, nn

LAYER_BYTES = 1000
REST_BYTES = 50


@pytest.mark.parametrize(
    ("free", "in_flight_count", "expected"),
    [
        # The rest takes 5,000 bytes of 100 tokens; a further layer 100,000.
        (1_200_000, 1, 0),
        (5_000 + 1_100_000, 1, 0),
        (5_000 + 1_099_999, 1, 1),
        (5_000 + 250_000, 1, 9),
        (5_000 + 250_000, 2, 10),
        (5_000 + 99_999, 1, 11),
        # Not even the one layer that was kept is sure to fit.
        (4_999, 1, 12),
    ],
)
def test_as_many_layers_keep_their_activations_as_fit(free, in_flight_count, expected):
    num_layers = recomputed_layers(
        (LAYER_BYTES, REST_BYTES),
        layers=12,
        tokens=100,
        in_flight=in_flight_count,
        free=free,
    )
    assert num_layers == expected


def test_nothing_is_recomputed_for_layers_that_keep_nothing() -> None:
    assert recomputed_layers((0, 1), layers=4, tokens=9, in_flight=1, free=10) == 0


@pytest.mark.parametrize(
    ("pp", "vpp", "expected"), [(1, None, [1]), (4, None, [4, 3, 2, 1]), (2, 2, [5, 3])]
)
def test_earlier_stages_hold_more_micro_batches(pp, vpp, expected):
    parallel = ParallelSection(pp=pp, vpp=vpp)
    assert [in_flight(parallel, stage) for stage in range(pp)] == expected


class Layer(nn.Module):
    """A layer that keeps as many bytes as it is told, in the memory beside it."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()
        self._memory = memory
        self.kept_bytes = LAYER_BYTES

    def forward(self, hidden: Tensor) -> Tensor:
        self._memory.take(self.kept_bytes * len(hidden))
        return hidden


def test_memory_of_engines_that_have_not_loaded_is_not_planned_with(
    monkeypatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 200)
    assert memory_limit() == 900
    monkeypatch.setenv("SLIPSTREAM_ENGINES_SHARE", "0.4")
    assert memory_limit() == 600
    # The engines have their memory.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (300, 1000))
    assert memory_limit() == 500


class FakeMemory:
    """A GPU's memory of which tensors may use `limit` bytes."""

    def __init__(self, limit: int, patch: pytest.MonkeyPatch) -> None:
        self._now = self._peak = 0
        patch.setattr(recompute, "memory_limit", lambda: limit)
        patch.setattr(torch.cuda, "memory_allocated", self.allocated)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: self._peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self._watch)

    def take(self, num_bytes: int) -> None:
        self._now += num_bytes
        self._peak = max(self._peak, self._now)

    def allocated(self) -> int:
        return self._now

    def _watch(self) -> None:
        self._peak = self._now


class Block:
    """Megatron's model with a block of layers, of which some are recomputed."""

    def __init__(self, memory: FakeMemory, layers: int) -> None:
        config = SimpleNamespace(
            recompute_granularity=None, recompute_method=None, recompute_num_layers=None
        )
        self.config = config
        stack = [Layer(memory) for _ in range(layers)]
        self.decoder = SimpleNamespace(
            config=config, layers=stack, register_forward_pre_hook=lambda *_, **__: None
        )
        self._memory = memory

    def train(self, tokens: int) -> None:
        """A pass that frees what it took, of each recomputed layer before the next one's."""
        before = self._memory.allocated()
        recomputed = self.config.recompute_num_layers or 0
        for layer in self.decoder.layers[recomputed:]:
            layer(torch.zeros(tokens))
        self._memory.take(REST_BYTES * tokens)
        self._memory.take(before - self._memory.allocated())
        for layer in self.decoder.layers[:recomputed]:
            layer(torch.zeros(tokens))
            self._memory.take(before - self._memory.allocated())


class Ranks:
    """This rank, on the only stage, and another one that recomputes `other` of its layers."""

    stage = 0

    def __init__(self, other: float = 0.0) -> None:
        self._other = other

    def max(self, values: Tensor) -> Tensor:
        return values.clamp(min=self._other)


@pytest.mark.parametrize(
    ("limit", "other", "expected"),
    [
        # A tenth stays free. The optimizer took 1,000,000 meanwhile; 200 tokens are trained.
        (10_000_000, 0.0, 0),
        (2_330_000, 0.0, 3),
        (2_330_000, 0.5, 4),
        (1_100_000, 0.0, 8),
    ],
)
def test_the_second_pass_follows_what_the_first_measured(
    limit, other, expected, monkeypatch
):
    memory = FakeMemory(limit, monkeypatch)
    block: Any = Block(memory, 8)
    plan = Recompute([block], LearnerSection(micro_batch_tokens=200))
    assert block.config.recompute_num_layers == 7
    ranks: Any = Ranks(other)
    with plan.training_pass([100, 40], ranks):
        block.train(100)
        block.train(40)
    memory.take(1_000_000)
    with plan.training_pass([100], ranks):
        block.train(100)
    assert plan.num_layers == expected
    assert block.config.recompute_num_layers == (expected or None)
    assert block.config.recompute_granularity == ("full" if expected else None)
    # The plan stays.
    memory.take(500_000)
    with plan.training_pass([100], ranks):
        block.train(100)
    assert plan.num_layers == expected


def num_layers_of(block: Any, other: float = 0.0) -> int:
    """The layers that are recomputed after two passes of 100 tokens."""
    plan = Recompute([block], LearnerSection(micro_batch_tokens=200))
    ranks = Ranks(other)
    for _ in range(2):
        with plan.training_pass([100], ranks):  # type: ignore[arg-type]
            block.train(100)
    return plan.num_layers


def test_the_layer_that_keeps_most_counts_even_if_it_was_recomputed(
    monkeypatch,
) -> None:
    memory = FakeMemory(2_330_000, monkeypatch)
    block = Block(memory, 8)
    block.decoder.layers[2].kept_bytes = 2 * LAYER_BYTES
    # The rest takes 410,000 of 2,097,000 bytes, and each further layer 400,000.
    assert num_layers_of(block) == 3


def test_a_first_pass_that_fails_is_measured_again(monkeypatch) -> None:
    memory = FakeMemory(10_000_000, monkeypatch)
    plan = Recompute([Block(memory, 8)], LearnerSection(micro_batch_tokens=200))
    ranks: Any = Ranks()
    with pytest.raises(ValueError, match="no number"), plan.training_pass([100], ranks):
        raise ValueError("no number")
    assert plan.measured is None
    with plan.training_pass([100], ranks):
        pass
    assert plan.measured is not None
    assert plan.num_layers == 7


def test_a_stage_without_layers_recomputes_none_whatever_others_do(monkeypatch) -> None:
    memory = FakeMemory(10_000_000, monkeypatch)
    assert num_layers_of(Block(memory, 0), other=0.5) == 0
