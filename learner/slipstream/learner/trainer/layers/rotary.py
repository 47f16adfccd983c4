"""The rotary embedding of a Hugging Face configuration in Megatron's model.

transformers computes the frequencies, so training supports all its kinds of RoPE scaling.
"""

import math
from typing import Any

import torch
from slipstream.learner.trainer import Megatron


def rotary_settings(provider: Megatron, hf_config: Megatron) -> dict[str, object]:
    """Returns Megatron's settings of the rotary embedding; only `set_frequencies` scales."""
    rope: dict[str, Any] = hf_config.rope_parameters
    values: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": float(rope.get("partial_rotary_factor", 1.0)),
        "rope_scaling": False,
        "seq_len_interpolation_factor": None,
        "yarn_rotary_scaling_factor": None,
    }
    _, factor = _scaled(hf_config)
    if provider.multi_latent_attention:
        # Only a part of each head is rotated, so a factor of queries and keys cannot become a scale
        # of scores; `field_problems` refuses a factor other than 1. Attention scales scores itself.
        assert factor == 1.0
        return values | {
            "rope_type": "rope",
            "rotary_scaling_factor": float(rope.get("factor", 1.0)),
            "mscale_all_dim": float(rope.get("mscale_all_dim", 1.0)),
        }
    if factor != 1.0:
        # Scaled queries and keys have scores scaled by the square.
        scale = provider.softmax_scale or 1.0 / math.sqrt(provider.kv_channels)
        values["softmax_scale"] = factor**2 * scale
    return values


def set_frequencies(chunks: list[Megatron], *, hf_config: Megatron) -> list[Megatron]:
    """Gives `chunks` the scaled rotary frequencies of `hf_config`, if any; returns `chunks`."""
    frequencies, _ = _scaled(hf_config)
    if frequencies is None:
        return chunks
    for chunk in chunks:
        # Latent attention has its own in each layer.
        is_latent = chunk.config.multi_latent_attention
        holders = [layer.self_attention for layer in chunk.decoder.layers]
        for rotary in (one.rotary_pos_emb for one in (holders if is_latent else [chunk])):
            rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    return chunks


def _scaled(hf_config: Megatron) -> tuple[torch.Tensor | None, float]:
    """Returns scaled frequencies, or None, and a factor of queries and keys."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = hf_config.rope_parameters["rope_type"]
    if scaling == "default":
        return None, 1.0
    found, factor = ROPE_INIT_FUNCTIONS[scaling](hf_config, torch.device("cpu"))
    return found.float(), float(factor)
