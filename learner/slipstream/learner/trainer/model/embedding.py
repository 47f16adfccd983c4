"""The embedding of tokens, whose gradient has rows for the tokens of a micro batch alone.

Megatron's gradient has a row for each entry of the vocabulary, nearly all of them 0, which is added
to the sum of all micro batches. Import this module only after `compat.install`, as it imports
Megatron.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.logprobs import as_gradient, gradient_sum
from torch import Tensor


def add_rows_alone(chunks: list[Megatron]) -> list[Megatron]:
    """Makes the embeddings of `chunks` add the rows of their tokens alone; returns `chunks`."""
    for embedding in (module for chunk in chunks for module in chunk.modules()):
        if type(embedding) is VocabParallelEmbedding:
            embedding.forward = types.MethodType(_embed, embedding)
            # No gradient of a tied weight is left for Megatron to add.
            embedding.weight.zero_out_wgrad = False
    return chunks


def _embed(layer: Megatron, token_ids: Tensor) -> Tensor:
    """Returns what Megatron's embedding `layer` returns."""
    places = token_ids
    if layer.tp_group.size() > 1:
        places = token_ids - layer.vocab_start_index
        is_other = (places < 0) | (places >= len(layer.weight))
        places = places.masked_fill(is_other, 0)
    rows: Tensor = _Rows.apply(layer.weight, places)  # type: ignore[no-untyped-call]
    if layer.tp_group.size() > 1:
        rows = rows.masked_fill(is_other[..., None], 0.0)
    reduce = reduce_from_tensor_model_parallel_region
    if layer.reduce_scatter_embeddings:
        rows = rows.transpose(0, 1)
        reduce = reduce_scatter_to_sequence_parallel_region
    embeddings: Tensor = reduce(rows.contiguous(), group=layer.tp_group)
    return embeddings


class _Rows(torch.autograd.Function):
    """The rows of a weight at `places`; their gradients are added in the same order each time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, places: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(weight, places)
        return F.embedding(places, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        weight, places = ctx.saved_tensors
        total = gradient_sum(weight)
        places = places.flatten()
        # A place gets the number of its value among the different ones, without a wait for the
        # device, which alone knows how many there are.
        order = places.argsort(stable=True)
        starts = F.pad(places[order].diff() != 0, (1, 0))
        numbers = torch.empty_like(places).index_copy_(0, order, starts.cumsum(0))
        sums = torch.ops.aten.embedding_dense_backward(
            grad.flatten(0, -2).to(total.dtype),
            numbers,
            len(places),
            -1,
            False,
        )
        # Sums of 0 are left over, for which any row will do.
        owners = torch.arange(len(places), device=places.device) % len(weight)
        owners.index_copy_(0, numbers, places)
        total.index_add_(0, owners, sums)
        return as_gradient(weight, total), None
