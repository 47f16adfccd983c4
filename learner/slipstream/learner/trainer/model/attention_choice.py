"""Which attention runs: TransformerEngine decides at the first call, from shapes and versions."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_DECISION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_KINDS = {
    "use_flash_attention": "flash attention",
    "use_fused_attention": "fused attention (cuDNN)",
    "use_unfused_attention": "unfused attention",
}


@functools.cache
def log_attention_once() -> None:
    """One line in the log, after the first call of the attention; nothing is decided here."""
    logger.info("attention: %s", chosen_attention())


def chosen_attention() -> str:
    """What the last call of the attention ran, in one line."""
    if _DECISION not in sys.modules:
        return "torch's scaled_dot_product_attention"
    return describe(vars(importlib.import_module(_DECISION)))


def describe(decision: dict[str, Any]) -> str:
    """What TransformerEngine says of its last decision, in one line; `decision` is its module's."""
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
