"""vLLM on a CPU with plain matrices, as on a GPU: it packs none when it has loaded it."""

from __future__ import annotations

import pytest


def keep_matrices_plain(patch: pytest.MonkeyPatch | None = None) -> None:
    """In this process and those that are forked from it; for ever without `patch`."""
    import vllm._custom_ops
    from vllm.model_executor.layers import utils

    patch = patch or pytest.MonkeyPatch()
    patch.setattr(vllm._custom_ops, "_supports_onednn", False)
    # Small matrices have a form of their own on processors with AMX.
    patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
