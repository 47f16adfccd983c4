"""Which attention gets the kernels of heads."""

from types import SimpleNamespace

import pytest
from megatron.core.transformer.attention import SelfAttention
from slipstream.learner.trainer.layers import heads

PLAIN = {
    "apply_rope_fusion": True,
    "kv_channels": 128,
    "num_query_groups": 8,
    "tensor_model_parallel_size": 2,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "rotary_percent": 1.0,
    "attention_output_gate": False,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
}


@pytest.mark.parametrize(
    ("changes", "are_plain"),
    [
        ({}, True),
        ({"qk_layernorm": False, "normalization": "LayerNorm"}, True),
        ({"apply_rope_fusion": False}, False),
        ({"kv_channels": 80}, False),
        # Ranks would share a group, whose heads Megatron gathers and cuts.
        ({"tensor_model_parallel_size": 16}, False),
        ({"normalization": "LayerNorm"}, False),
        ({"rotary_percent": 0.5}, False),
        ({"has_whole_norms": True}, False),
        ({"attention_output_gate": True}, False),
        ({"multi_latent_attention": True}, False),
        ({"no_rope_freq": [0, 1]}, False),
        ({"qk_l2_norm": True}, False),
        ({"rotary_interleaved": True}, False),
    ],
)
def test_attention_that_the_kernels_do_not_know_stays_megatrons(
    changes: dict, are_plain: bool
) -> None:
    config = SimpleNamespace(**PLAIN | changes)
    assert heads.are_plain(config) is are_plain

    class OtherAttention(SelfAttention):
        pass

    attention, other = (kind.__new__(kind) for kind in (SelfAttention, OtherAttention))
    attention.__dict__["config"] = other.__dict__["config"] = config
    chunk = SimpleNamespace(modules=lambda: [attention, other])
    assert heads.fuse_heads([chunk]) == [chunk]
    assert type(attention) is (heads.FusedHeads if are_plain else SelfAttention)
    assert type(other) is OtherAttention
