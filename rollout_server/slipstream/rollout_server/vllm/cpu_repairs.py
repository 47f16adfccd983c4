"""Repairs vLLM on CPUs.

vLLM (0.32.0) gives each drafted token the temperature, top-p and top-k of its request. On CPUs it
writes floating-point values into a copy of its output and drops the copy, so that drafts are
verified with whatever the memory held. `repair_expansion` corrects this. `repair_layers` corrects
its rotary embedding of latent attention, whose kernel for CPUs takes one head for all, and its
routers, which take sigmoid scores only with groups of experts. Import this module on CPUs only.
"""

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
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


_make_router, _rotate = CPURouter.__init__, RotaryEmbedding.forward_cpu


def repair_layers() -> None:
    """Corrects vLLM's rotary embedding and router for CPUs, in this process and its later forks."""
    CPURouter.__init__, RotaryEmbedding.forward_cpu = _made, _rotated


def _made(self: CPURouter, *args: object, **named: object) -> None:
    _make_router(self, *args, **named)
    if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1


def _rotated(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    # Other attention has the heads of a token in one dimension.
    rotate = _rotate if query.dim() == 2 else RotaryEmbedding.forward_native
    found: tuple[Tensor, Tensor | None] = rotate(self, positions, query, key)
    return found
