"""Latent attention without TransformerEngine in tensor parallel layouts.

Megatron splits the matrices that make the latent vectors by rows, and gathers their outputs on all
ranks. Each rank then turns the shared part of the keys for its own heads, and the gradients of the
other ranks' heads are lost. Here each rank makes whole vectors of its own tokens instead, as
TransformerEngine's layers do.
"""

from __future__ import annotations

import types

import torch.nn.functional as F
from slipstream.learner.trainer.layers.attention import GatheredRows
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor

_MATRICES = ("linear_q_down_proj", "linear_kv_down_proj")


def make_whole_vectors(chunks: list[Megatron]) -> list[Megatron]:
    """Makes the layers of `chunks` gather matrices instead of vectors.

    Tokens must be split by sequence parallelism.
    """
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for name in _MATRICES:
                matrix = getattr(layer.self_attention, name, None)
                if matrix is not None:
                    matrix.forward = types.MethodType(_whole_vectors, matrix)
    return chunks


def _whole_vectors(matrix: Megatron, tokens: Tensor) -> tuple[Tensor, None]:
    """Returns the whole vectors of this rank's tokens; collective."""
    weight = GatheredRows.apply(matrix.weight, matrix.tp_group)  # type: ignore[no-untyped-call]
    return F.linear(tokens, weight), None
