"""Describes the attention kernel that TransformerEngine, or torch, used last.

TransformerEngine chooses a kernel at the first call, by shapes and library versions.
"""

import functools
import importlib
import logging
import sys
from typing import Any

import torch

logger = logging.getLogger(__name__)

_DECISION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_KINDS = {
    "use_flash_attention": "flash attention",
    "use_fused_attention": "fused attention (cuDNN)",
    "use_unfused_attention": "unfused attention",
}


@functools.cache
def log_attention_once() -> None:
    """Logs the attention kernel once in a process; call this after the first forward pass."""
    logger.info("attention: %s", chosen_attention())


def chosen_attention() -> str:
    """Returns one line that describes the kernel of the last call of attention."""
    if _DECISION not in sys.modules:
        return "torch's scaled_dot_product_attention"
    return describe(vars(importlib.import_module(_DECISION)))


def kernel_and_remedy(*, of_torch: bool) -> tuple[str, str]:
    """Returns the kernel of the last call of attention, and a change that avoids this kernel.

    `of_torch` tells whether torch's own attention is used, without TransformerEngine.
    """
    if of_torch:
        return f"torch {torch.__version__}", "another version of torch"
    chosen = chosen_attention()
    if chosen.startswith(_KINDS["use_unfused_attention"]):
        return chosen, "another version of TransformerEngine"
    if "cuDNN" not in chosen:
        return chosen, "NVTE_FLASH_ATTN=0 in the environment of the trainer"
    utils = importlib.import_module("transformer_engine.pytorch.utils")
    version = ".".join(map(str, utils.get_cudnn_version()))
    newer = "a newer cuDNN (in CUDNN_HOME), or NVTE_FUSED_ATTN=0 in the environment of the trainer"
    return f"{chosen}, cuDNN {version}", newer


def describe(decision: dict[str, Any]) -> str:
    """Returns kind, layout and element type of the kernel that TransformerEngine chose last.

    `decision` is the namespace of TransformerEngine's module `dot_product_attention`.
    """
    found = decision["_attention_backends"]
    kinds = [name for key, name in _KINDS.items() if found[key]]
    parameters = found["attention_params"]
    text = " and ".join(kinds) or "none"
    if parameters is None:
        return text
    text += f", {parameters.qkv_layout} {str(parameters.qkv_dtype).removeprefix('torch.')}"
    if parameters.context_parallel:
        text += f", sequences split over ranks by {parameters.cp_comm_type}"
    return text + (", deterministic" if parameters.deterministic else "")
