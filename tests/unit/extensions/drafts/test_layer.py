import math

import pytest
import torch
import torch.nn.functional as F
from slipstream.extensions.drafts.layer import DraftLayer, draft_states
from slipstream.extensions.drafts.shape import DraftShape
from torch import Tensor

SHAPE = DraftShape(
    hidden_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=20,
    vocab_size=30,
    rope_theta=100.0,
    rms_norm_eps=1e-5,
)
ROWS = 9
DEPTH = 4


def random_weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(size, generator=random, dtype=torch.float64) * 0.4
        for name, size in SHAPE.tensors()
    }


class Cache:
    """The layer as an engine runs it: a row at a time, with keys and values of the rows before."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = {
            name.removeprefix("layers.0."): w for name, w in weights.items()
        }
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def output(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        weights = self._weights
        place = len(self.keys)
        states = weights["fc.weight"] @ torch.cat([embedded, hidden])
        angles = torch.tensor(
            [place * SHAPE.rope_theta ** (-2 * n / SHAPE.head_dim) for n in range(3)],
            dtype=torch.float64,
        )
        turned = []
        for name in ("q_proj", "k_proj"):
            first, second = (
                (weights[f"self_attn.{name}.weight"] @ states)
                .view(-1, 6)
                .chunk(2, dim=1)
            )
            cos = angles.cos()
            sin = angles.sin()
            turned.append(
                torch.cat([first * cos - second * sin, second * cos + first * sin], 1)
            )
        self.keys.append(turned[1])
        self.values.append((weights["self_attn.v_proj.weight"] @ states).view(-1, 6))
        keys = torch.stack(self.keys)
        values = torch.stack(self.values)
        mixed = []
        for head in range(SHAPE.num_attention_heads):
            group = head // (SHAPE.num_attention_heads // SHAPE.num_key_value_heads)
            scores = keys[:, group] @ turned[0][head] / math.sqrt(SHAPE.head_dim)
            mixed.append(scores.softmax(0) @ values[:, group])
        states = states + weights["self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = states / (states.square().mean() + SHAPE.rms_norm_eps).sqrt()
        normed = normed * weights["post_attention_layernorm.weight"]
        gate = F.silu(weights["mlp.gate_proj.weight"] @ normed)
        inner = gate * (weights["mlp.up_proj.weight"] @ normed)
        return states + weights["mlp.down_proj.weight"] @ inner


def test_outputs_are_those_of_an_engine_that_drafts_from_each_token() -> None:
    weights = random_weights()
    random = torch.Generator().manual_seed(2)
    embedded, hidden = torch.randn(
        2, 1, ROWS, 12, generator=random, dtype=torch.float64
    )
    states = draft_states(weights, SHAPE, embedded, hidden, DEPTH)
    for start in range(ROWS - DEPTH + 1):
        cache = Cache(weights)
        for row in range(start):
            cache.output(embedded[0, row], hidden[0, row])
        state = hidden[0, start]
        for depth in range(DEPTH):
            state = cache.output(embedded[0, start + depth], state)
            torch.testing.assert_close(states[depth][0, start + depth], state)


def test_windows_do_not_see_each_other() -> None:
    weights = random_weights()
    embedded, hidden = torch.randn(2, 3, ROWS, 12, dtype=torch.float64)
    together = draft_states(weights, SHAPE, embedded, hidden, 2)
    alone = draft_states(weights, SHAPE, embedded[1:2], hidden[1:2], 2)
    for output, other in zip(together, alone, strict=True):
        torch.testing.assert_close(output[1, 1:], other[0, 1:])


def test_updates_are_those_of_torchs_adam_with_a_bounded_norm() -> None:
    layer = DraftLayer(SHAPE, seed=3, device=torch.device("cpu"))
    parameter = torch.nn.Parameter(layer.values.detach().clone())
    adam = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for scale in (0.001, 3.0, 0.01):
        gradient = torch.randn(len(parameter)) * scale
        layer.update(gradient, 0.01)
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        adam.step()
        torch.testing.assert_close(
            layer.values.detach(), parameter.detach(), rtol=1e-4, atol=1e-6
        )
    assert layer.updates == 3


@pytest.mark.parametrize("faulty", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(faulty: float) -> None:
    layer = DraftLayer(SHAPE, seed=3, device=torch.device("cpu"))
    layer.update(torch.ones(len(layer.values)), 0.1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    gradient = torch.ones(len(layer.values)).index_fill(0, torch.tensor([5]), faulty)
    assert not layer.update(gradient, 0.1)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_new_layer_adds_nothing_to_its_first_product() -> None:
    layer = DraftLayer(SHAPE, seed=3, device=torch.device("cpu"))
    weights = layer.named()
    assert {name: tuple(value.shape) for name, value in weights.items()} == dict(
        SHAPE.tensors()
    )
    embedded, hidden = torch.randn(2, 1, ROWS, 12)
    (first,) = draft_states(weights, SHAPE, embedded, hidden, 1)
    torch.testing.assert_close(
        first, torch.cat([embedded, hidden], -1) @ weights["fc.weight"].T
    )
    again = DraftLayer(SHAPE, seed=3, device=torch.device("cpu"))
    assert torch.equal(again.values, layer.values)
    other = DraftLayer(SHAPE, seed=4, device=torch.device("cpu"))
    assert not torch.equal(other.values, layer.values)


def test_a_view_of_the_values_follows_them() -> None:
    layer = DraftLayer(SHAPE, seed=3, device=torch.device("cpu"))
    view = layer.published()["draft.fc.weight"]
    before = view.clone()
    layer.update(torch.ones(len(layer.values)), 0.1)
    assert not torch.equal(view, before)
    assert torch.equal(view.flatten(), layer.values.detach()[: view.numel()])


@pytest.mark.parametrize("experts", [0, 4])
def test_the_shape_is_the_policys(experts: int) -> None:
    from slipstream.core.models.model_sizes import ModelSizes

    table = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 99,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }
    if experts:
        table |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    shape = DraftShape.of(ModelSizes.of(table))
    ffn = 64 if experts else 128
    assert shape == DraftShape(64, 8, 2, 16, ffn, 99, 5e5, 1e-5)
