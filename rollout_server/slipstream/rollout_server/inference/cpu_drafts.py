"""Repairs vLLM's sampling behind drafts on CPUs.

vLLM (0.32.0) gives each drafted token the temperature, top-p and top-k of its request. On CPUs it
writes floating-point values into a copy and drops that, so that drafts are verified with whatever
the memory held. Import this module on CPUs only.
"""

from __future__ import annotations

import torch
from vllm.utils import cpu_triton_utils


def repair_expansion() -> None:
    """Makes the workers that this process forks later fill these values in."""
    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 - vLLM's name
) -> None:
    """Writes `values[n]` to `output` for each token of request n, `replace_to` for `replace_from`.

    The tokens of request n end at `cu_num_tokens[n]`.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = values.where(values != replace_from, replace_to).to(output.dtype)
    output.copy_(replaced.repeat_interleave(lengths.long()))
