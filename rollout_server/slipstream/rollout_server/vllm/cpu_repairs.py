"""Repairs vLLM on CPUs.

vLLM (0.32.0) gives each drafted token the temperature, top-p and top-k of its request. On CPUs it
writes floating-point values into a copy of its output and drops the copy, so that drafts are
verified with whatever the memory held. `repair_expansion` corrects this. `compute_by_rows` replaces
matrix products and norms by batch-invariant ones: a row does not depend on other rows. Import this
module on CPUs only.
"""

from typing import Any

import torch
from slipstream.core import row_kernels
from torch import Tensor
from vllm.model_executor.layers import logits_processor, utils
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils import cpu_triton_utils


def repair_expansion() -> None:
    """Replaces vLLM's expansion of sampling values by `expand`, in this process and later forks."""
    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 - vLLM's name
) -> None:
    """Writes `values[n]` to `output` for each token of request n.

    `cu_num_tokens` has the number of tokens up to the end of each request. Values equal to
    `replace_from` are replaced by `replace_to`.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = values.where(values != replace_from, replace_to).to(output.dtype)
    output.copy_(replaced.repeat_interleave(lengths.long()))


def compute_by_rows() -> None:
    """Makes vLLM's matrix products and norms batch-invariant, in this process and its later forks.

    Products then read a layer's weights as they were loaded, without prepacking.
    """
    utils.dispatch_cpu_unquantized_gemm = _dispatch
    RMSNorm.forward_native = RMSNorm.forward_cpu = _normed
    logits_processor.LogitsProcessor._apply_head = _head


def _dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's
    layer.cpu_linear = row_kernels.product


def _normed(
    self: RMSNorm, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    # vLLM would take the norm of a sum before the sum is rounded, which the learner adds elsewhere.
    total = x if residual is None else x + residual
    found = row_kernels.norm(total, self.weight.data, self.variance_epsilon)
    return found if residual is None else (found, total)


def _head(
    self: logits_processor.LogitsProcessor,
    lm_head: Any,  # noqa: ANN401 - vLLM's
    hidden_states: Tensor,
    embedding_bias: Tensor | None,
) -> Tensor:
    dtype = self.head_dtype or hidden_states.dtype
    weight = lm_head.weight.to(dtype)
    return row_kernels.product(hidden_states.to(dtype), weight, embedding_bias)
