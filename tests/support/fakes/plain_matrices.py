"""vLLM on a CPU with plain matrices, as on a GPU: it packs none when it has loaded it.

Products of float8 are computed in float32 as well as they are by torch, a thousand times as fast.
"""

from typing import Any

import pytest
import torch


def keep_matrices_plain(patch: pytest.MonkeyPatch | None = None) -> None:
    """In this process and those that are forked from it; for ever without `patch`."""
    import vllm._custom_ops
    from vllm.model_executor.layers import utils

    patch = patch or pytest.MonkeyPatch()
    patch.setattr(vllm._custom_ops, "_supports_onednn", False)
    # Small matrices have a form of their own on processors with AMX.
    patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)


def multiply_float8_fast() -> None:
    """Has this process, and those that are forked from it, multiply so for ever."""
    torch._scaled_mm = _scaled_product


def _scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    **_: Any,
) -> torch.Tensor:
    return (left.float() @ right.float() * (scale_a * scale_b)).to(out_dtype)
