"""New parameters lie on the GPU before any weight is loaded: NCCL scatters weights into them."""

from collections.abc import Callable, Iterable

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from slipstream.learner.trainer.layers.attention import new_scores
from slipstream.learner.trainer.layers.experts import GroupedLinear
from slipstream.learner.trainer.layers.norms import RMSNorm, WholeNorm


def matrices(config: TransformerConfig) -> Iterable[torch.Tensor]:
    shape = (8, 4)
    return GroupedLinear(
        2, shape, partition_dim=0, config=config, groups=None, has_bias=True
    ).parameters()


MADE: dict[str, Callable[[TransformerConfig], Iterable[torch.Tensor]]] = {
    "experts": matrices,
    "norm": lambda config: RMSNorm(config, 8).parameters(),
    "norm of all heads": lambda config: WholeNorm(
        config, 4, 1e-5, heads=4
    ).parameters(),
    "sinks": lambda config: [new_scores(config)],
}


@pytest.mark.parametrize("part", MADE)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_new_parameters_lie_where_weights_are_loaded(part, on_cpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=on_cpu,
        cuda_graph_modules=[],
    )
    kinds = {parameter.device.type for parameter in MADE[part](config)}
    assert kinds == {"cpu" if on_cpu else "meta"}
