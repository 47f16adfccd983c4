"""Attention sinks: each head has a place beside the tokens, which takes a share of its weights.

The place has a learnt score and no value. TransformerEngine 2.11 has no kernel with sinks for
packed sequences (`get_attention_backend` in its `dot_product_attention/utils.py`), so torch's own
is used on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor


def new_scores(config: Megatron) -> torch.nn.Parameter:
    """Returns the sinks' scores of this rank's heads, to be loaded."""
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    own = config.num_attention_heads // config.tensor_model_parallel_size
    # NaN reveals scores that were not loaded.
    scores = torch.nn.Parameter(
        torch.full((own,), torch.nan, dtype=config.params_dtype, device=device)
    )
    # The gradient norm counts the scores of all ranks.
    scores.tensor_model_parallel = True  # type: ignore[attr-defined]
    return scores


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scores: Tensor,
    scale: float,
) -> Tensor:
    """Attends over dim 2 of [sequences, heads, length, dim] with a sink for each query head.

    The sink is a key before all others, in dimensions of its own: query heads that share a key head
    have one each, which is 0 in all other keys. So torch's fast kernels take it, and hold no
    scores. Without a mask attention is causal; a query is then put before the others for the sink.
    """
    is_causal = mask is None
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    length, dim = query.shape[2:]
    groups = key.shape[1]
    per_group = query.shape[1] // groups
    # Two dimensions for each: 1 / scale may have more digits than the element type.
    large = torch.tensor(1.0 / scale, dtype=query.dtype, device=query.device)
    small = (1.0 / scale - large.double()).to(query.dtype)
    chosen = torch.eye(per_group, dtype=query.dtype, device=query.device).repeat(groups, 1)
    chosen = torch.cat([chosen * large, chosen * small], dim=-1)[None, :, None]
    query = torch.cat([query, chosen.expand(len(query), -1, length, -1)], dim=-1)
    by_group = scores.to(key.dtype).view(1, groups, 1, per_group).expand(len(key), -1, -1, -1)
    sink = torch.cat([by_group.new_zeros(len(key), groups, 1, dim), by_group, by_group], dim=-1)
    key = torch.cat([sink, F.pad(key, (0, 2 * per_group))], dim=2)
    value = F.pad(value, (0, 2 * per_group, 1, 0))
    found = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=per_group > 1,
    )[..., :dim]
    return found[:, :, 1:] if is_causal else found
