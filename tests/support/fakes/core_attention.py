"""A layer's attention without TransformerEngine, apart from its model."""

from types import SimpleNamespace
from typing import Any

import torch
from slipstream.learner.trainer.ranks import compat, cpu

HEADS = 4
GROUPS = 2
SIZE = 16


def core_attention(dtype: torch.dtype, **settings: object) -> Any:
    """Returns `CoreAttention` with random sinks, if the settings give it any."""
    cpu.install()
    compat.install()
    from slipstream.learner.trainer.layers.attention import CoreAttention

    config = {
        "kv_channels": SIZE,
        "window_size": None,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
        "num_attention_heads": HEADS,
        "tensor_model_parallel_size": 1,
        "params_dtype": dtype,
        "use_cpu_initialization": True,
    }
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    attention = CoreAttention(
        SimpleNamespace(**config | settings), 1, None, "self", pg_collection=groups
    )
    if attention.softmax_offset is not None:
        torch.nn.init.normal_(attention.softmax_offset)
    return attention
