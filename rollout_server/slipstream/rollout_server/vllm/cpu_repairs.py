"""Repairs vLLM on CPUs.

vLLM (0.32.0) gives each drafted token the temperature, top-p and top-k of its request. On CPUs it
writes floating-point values into a copy of its output and drops the copy, so that drafts are
verified with whatever the memory held. `repair_expansion` corrects this. Import this module on CPUs
only.
"""

import torch
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
