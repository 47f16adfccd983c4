"""The rotary embedding of a Hugging Face configuration in Megatron's model.

transformers computes the frequencies, so training supports all its kinds of RoPE scaling.
"""

import math
from typing import Any

import torch
from slipstream.learner.trainer import Megatron

# Kinds of layers, which have different rotary embeddings in some families.
FULL = "full_attention"
LOCAL = "sliding_attention"


def rotary_settings(provider: Megatron, hf_config: Megatron) -> dict[str, object]:
    """Returns Megatron's settings of the rotary embedding; only `set_frequencies` scales."""
    rope: dict[str, Any] = hf_config.rope_parameters
    rope = rope.get(FULL, rope)
    values: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": float(rope.get("partial_rotary_factor", 1.0)),
        "rope_scaling": False,
        "seq_len_interpolation_factor": None,
        "yarn_rotary_scaling_factor": None,
    }
    _, factor = _scaled(hf_config, FULL)
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
    """Gives `chunks` the scaled rotary frequencies of `hf_config`, if it has any; returns `chunks`.

    Sliding-window layers get a rotary embedding of their own if `hf_config` has one for them.
    """
    frequencies, _ = _scaled(hf_config, FULL)
    for chunk in chunks:
        if frequencies is not None:
            # Latent attention has its own in each layer.
            is_latent = chunk.config.multi_latent_attention
            holders = [layer.self_attention for layer in chunk.decoder.layers]
            for rotary in (holder.rotary_pos_emb for holder in (holders if is_latent else [chunk])):
                rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
        if LOCAL in hf_config.rope_parameters:
            _set_local(chunk, hf_config)
    return chunks


def _set_local(chunk: Megatron, hf_config: Megatron) -> None:
    """Gives the sliding-window layers of `chunk` a rotary embedding of their own."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    frequencies, factor = _scaled(hf_config, LOCAL)
    assert factor == 1.0, "a factor would need a scale of scores for each layer"
    config = chunk.config
    rotary = chunk.local_rotary_pos_emb = RotaryEmbedding(
        config.kv_channels,
        config.rotary_percent,
        rotary_base=float(hf_config.rope_parameters[LOCAL]["rope_theta"]),
        use_cpu_initialization=config.use_cpu_initialization,
    )
    if frequencies is not None:
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)

    def positions(
        _: object, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert keywords["packed_seq_params"] is not None, "only packed sequences have all angles"
        angles = rotary(len(keywords["rotary_pos_emb"]), packed_seq=True)
        return arguments, keywords | {"rotary_pos_emb": angles}

    for layer in chunk.decoder.layers:
        if hf_config.layer_types[layer.layer_number - 1] == LOCAL:
            layer.self_attention.register_forward_pre_hook(positions, with_kwargs=True)


def _scaled(hf_config: Megatron, kind: str) -> tuple[torch.Tensor | None, float]:
    """Returns scaled frequencies, or None, and a factor of queries and keys of layers of `kind`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = hf_config.rope_parameters
    layer_type = {"layer_type": kind} if kind in table else {}
    scaling = table.get(kind, table)["rope_type"]
    if scaling == "default":
        return None, 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](hf_config, torch.device("cpu"), **layer_type)
    return frequencies.float(), float(factor)
