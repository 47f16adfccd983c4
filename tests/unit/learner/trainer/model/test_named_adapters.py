"""Clients' adapters of several ranks in one model, with torch's own AdamW."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.learner.trainer.model.model import DeviceMemory
from slipstream.learner.trainer.model.policy import NamedAdapters, draw_adapters
from slipstream.learner.trainer.ranks import compat

# Importing Megatron starts git, and warns.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
LARGEST, WIDTH = 16, 6
# name -> rank, alpha, seed, learning rate
CLIENTS = {
    "a": (1, 8.0, 0, 0.1),
    "b": (4, 2.0, 3, 0.05),
    "c": (16, 16.0, 0, 0.1),
    "d": (4, 2.0, 3, 0.2),
}
ONE_RANK: Any = SimpleNamespace(tp_size=1, tp_group=SimpleNamespace(rank=lambda: 0))


class Adapter(torch.nn.Module):
    """The factors of an adapter, as Bridge has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(WIDTH, LARGEST, bias=False)
        self.linear_out = torch.nn.Linear(LARGEST, WIDTH, bias=False)
        self.input_is_parallel = False
        self.dim, self.alpha = LARGEST, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_out(self.linear_in(x)) * (self.alpha / self.dim)


class Chunk(torch.nn.Module):
    """A model with one adapted matrix, the second of its layer has no adapter."""

    def __init__(self) -> None:
        from megatron.bridge.peft.lora_layers import LoRALinear

        super().__init__()
        base = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        base.requires_grad_(requires_grad=False)
        layer = torch.nn.Module()
        layer.layer_number = 1
        layer.linear_qkv = LoRALinear(base, Adapter())
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    @property
    def adapter(self) -> Adapter:
        return self.decoder.layers[0].linear_qkv.adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.decoder.layers[0].linear_qkv.to_wrap.weight.T + self.adapter(x)

    def zero_grad_buffer(self) -> None:
        for parameter in self.adapter.parameters():
            parameter.grad = torch.zeros_like(parameter)


class Scene:
    """A model with some of the clients' adapters."""

    def __init__(self, names: str) -> None:
        compat.install()
        torch.manual_seed(5)
        self.chunk = Chunk()
        self.optimizer = torch.optim.AdamW(self.chunk.adapter.parameters(), lr=0.1)
        part = SimpleNamespace(is_stub_optimizer=False, optimizer=self.optimizer)
        whole: Any = SimpleNamespace(
            chained_optimizers=[part],
            zero_grad=lambda: None,
            prepare_grads=lambda: None,
            step_with_ready_grads=self.optimizer.step,
        )
        self.adapters = NamedAdapters(
            list(names),
            chunks=[self.chunk],
            optimizer=whole,
            scaler=None,
            gather=lambda: None,
            memory=DeviceMemory(),
            are_clients=True,
        )
        for name in names:
            rank, _, seed, _ = CLIENTS[name]
            with self.adapters.active(name):
                draw_adapters(self.chunk, ONE_RANK, seed=seed, rank=rank, targets=["linear_qkv"])

    def train(self, name: str, step: int) -> float:
        """Makes a step of a client; returns its loss."""
        rank, alpha, _, rate = CLIENTS[name]
        random = torch.Generator().manual_seed(100 * step + ord(name))
        x, target = torch.randn(2, 9, WIDTH, generator=random)
        with self.adapters.in_use(name, rank=rank, alpha=alpha):
            self.chunk.zero_grad_buffer()
            loss = (self.chunk(x) - target).square().sum()
            loss.backward()
            self.optimizer.param_groups[0] |= {"lr": rate, "weight_decay": 0.1}
            self.optimizer.step()
        return float(loss.detach())

    def serve(self, name: str) -> None:
        rank, alpha, _, _ = CLIENTS[name]
        with self.adapters.in_use(name, rank=rank, alpha=alpha):
            self.adapters.serve(lambda number: number, scale=alpha / rank)

    def values(self, name: str, *, published: bool = False) -> list[torch.Tensor]:
        adapters = self.adapters
        with adapters.published(name) if published else adapters.active(name):
            return [tensor.detach().clone() for tensor in self.chunk.adapter.parameters()]


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def together() -> tuple[Scene, dict[str, list[float]]]:
    """The four clients, whose steps are interleaved; each has published after its second."""
    scene: Scene = Scene("abcd")
    losses: dict[str, list[float]] = {name: [] for name in CLIENTS}
    for step in range(4):
        for name in itertools.islice(itertools.cycle("abcd"), step, step + 4):
            losses[name].append(scene.train(name, step))
            if step == 1:
                scene.serve(name)
    return scene, losses


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_among_others_is_as_alone(name: str, together: Any) -> None:
    scene, losses = together
    alone = Scene(name)
    assert [alone.train(name, step) for step in range(4)] == losses[name]
    assert are_equal(scene.values(name), alone.values(name))


@pytest.mark.parametrize("name", CLIENTS)
def test_beyond_its_rank_an_adapter_stays_zero(name: str, together: Any) -> None:
    first, second = together[0].values(name)
    rank = CLIENTS[name][0]
    used = [row < rank for row in range(LARGEST)]
    assert (first.abs().amax(1) > 0).tolist() == used
    assert (second.abs().amax(0) > 0).tolist() == used


def test_an_adapter_begins_with_the_values_of_its_own_rank() -> None:
    chunk = Chunk()
    draw_adapters(chunk, ONE_RANK, seed=3)
    whole = chunk.adapter.linear_in.weight.clone()
    draw_adapters(chunk, ONE_RANK, seed=3, rank=4)
    assert torch.equal(chunk.adapter.linear_in.weight[:4], whole[:4])
    draw_adapters(chunk, ONE_RANK, seed=3, rank=4, targets=["linear_fc1"])
    assert not chunk.adapter.linear_in.weight.any()


@pytest.mark.parametrize("name", CLIENTS)
def test_servers_get_the_published_values_with_their_factor(name: str, together: Any) -> None:
    rank, alpha, _, _ = CLIENTS[name]
    alone = Scene(name)
    for step in range(2):
        alone.train(name, step)
    first, second = alone.values(name)
    served = together[0].values(name, published=True)
    assert are_equal(served, [first, second * (alpha / rank)])
    with together[0].adapters.published(name):
        adapter = together[0].chunk.adapter
        assert adapter.alpha / adapter.dim == 1.0
    assert together[0].chunk.adapter.dim == LARGEST


def test_values_that_are_not_finite_are_not_published(together: Any) -> None:
    scene = Scene("ab")
    scene.train("a", 0)
    scene.serve("a")
    before = scene.values("a", published=True)
    with scene.adapters.active("a"), torch.no_grad():
        scene.chunk.adapter.linear_in.weight[0, :2] = float("nan")
    with pytest.raises(UntrainableBatch, match="the adapter has 2 values that are not finite"):
        scene.serve("a")
    assert are_equal(scene.values("a", published=True), before)
    scene.train("b", 0)
    scene.serve("b")
