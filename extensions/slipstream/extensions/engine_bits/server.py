"""Batch-invariant products and norms for vLLM on CPUs: a row does not depend on other rows.

Import this module on CPUs only.
"""

from typing import Any

from slipstream.extensions.engine_bits import row_kernels
from torch import Tensor
from vllm.model_executor.layers import logits_processor, utils
from vllm.model_executor.layers.layernorm import RMSNorm


def compute_by_rows() -> None:
    """Makes vLLM's matrix products and norms batch-invariant, in this process and its later forks.

    Products then read a layer's weights as they were loaded, without prepacking.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's
        layer.cpu_linear = row_kernels.product

    def normed(
        self: RMSNorm, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # vLLM would take the norm of a sum before the sum is rounded, which the learner adds
        # elsewhere.
        total = x if residual is None else x + residual
        normed = row_kernels.norm(total, self.weight.data, self.variance_epsilon)
        return normed if residual is None else (normed, total)

    def head(
        self: logits_processor.LogitsProcessor,
        lm_head: Any,  # noqa: ANN401 - vLLM's
        hidden_states: Tensor,
        embedding_bias: Tensor | None,
    ) -> Tensor:
        dtype = self.head_dtype or hidden_states.dtype
        weight = lm_head.weight.to(dtype)
        return row_kernels.product(hidden_states.to(dtype), weight, embedding_bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    RMSNorm.forward_native = RMSNorm.forward_cpu = normed
    logits_processor.LogitsProcessor._apply_head = head
