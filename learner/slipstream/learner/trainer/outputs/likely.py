"""The most likely tokens of a model at each position, of a vocabulary split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from slipstream.learner.trainer.outputs.logprobs import CHUNK_LOGITS, Projection
from torch import Tensor


@torch.no_grad()
def likely_tokens(hidden: Tensor, weight: Tensor, top_k: int, projection: Projection) -> Tensor:
    """Returns the `top_k` most likely tokens of each row, int64 [rows, top_k], without an order.

    Arguments are those of `vocab_parallel_logprobs`; a cap and a temperature change no order.
    Collective over the group, and the same on all its ranks.
    """
    width, group = len(weight), projection.tp_group
    first = width * (group.rank() if group is not None else 0)
    num_tokens = max(0, min(width, projection.vocab_size - first))
    number = min(top_k, num_tokens)
    values = hidden.new_full((len(hidden), top_k), -torch.inf, dtype=torch.float32)
    ids = torch.zeros((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
    step = max(1, (projection.chunk_logits or CHUNK_LOGITS[weight.device.type]) // width)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        logits = F.linear(hidden[rows], weight[:num_tokens]).float()
        found = logits.topk(number, dim=-1)
        values[rows, :number], ids[rows, :number] = found.values, found.indices + first
    if group is None:
        return ids
    every_value = [torch.empty_like(values) for _ in range(group.size())]
    every_id = [torch.empty_like(ids) for _ in range(group.size())]
    dist.all_gather(every_value, values, group=group)
    dist.all_gather(every_id, ids, group=group)
    best = torch.cat(every_value, dim=1).topk(top_k, dim=1).indices
    return torch.cat(every_id, dim=1).gather(1, best)
