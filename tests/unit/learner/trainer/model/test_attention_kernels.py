"""The line that says which attention runs."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from slipstream.learner.trainer.layers.attention import (
    chosen_attention,
    kernel_and_remedy,
    log_attention_once,
)

DECISION = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
)

PARAMETERS = {
    "qkv_layout": "thd_thd_thd",
    "qkv_dtype": "torch.bfloat16",
    "context_parallel": False,
    "cp_comm_type": "p2p",
    "deterministic": False,
}


def decision(kind: str | None, **changes: object) -> dict:
    backends = dict.fromkeys(
        ("use_flash_attention", "use_fused_attention", "use_unfused_attention"), False
    )
    if kind is not None:
        backends[kind] = True
    parameters = SimpleNamespace(**PARAMETERS | changes)
    return {"_attention_backends": backends | {"attention_params": parameters}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            decision("use_fused_attention"),
            "fused attention (cuDNN), thd_thd_thd bfloat16",
        ),
        (decision("use_flash_attention"), "flash attention, thd_thd_thd bfloat16"),
        (
            decision("use_fused_attention", context_parallel=True, deterministic=True),
            "fused attention (cuDNN), thd_thd_thd bfloat16, sequences split over ranks by p2p, "
            "deterministic",
        ),
        (
            {
                "_attention_backends": decision(None)["_attention_backends"]
                | {"attention_params": None}
            },
            "none",
        ),
    ],
)
def test_decision_of_transformer_engine_is_one_line(
    monkeypatch, found: dict, expected: str
):
    monkeypatch.setitem(sys.modules, DECISION, SimpleNamespace(**found))
    assert chosen_attention() == expected


def test_attention_of_torch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    log_attention_once.cache_clear()
    with caplog.at_level(logging.INFO):
        log_attention_once()
        log_attention_once()
    assert caplog.messages == ["attention: torch's scaled_dot_product_attention"]


@pytest.mark.parametrize(
    ("kind", "kernel", "remedy"),
    [
        ("use_fused_attention", "bfloat16, cuDNN 9.14.0", "NVTE_FUSED_ATTN=0"),
        (
            "use_flash_attention",
            "flash attention, thd_thd_thd bfloat16",
            "NVTE_FLASH_ATTN=0",
        ),
        (
            "use_unfused_attention",
            "thd_thd_thd bfloat16",
            "another version of TransformerEngine",
        ),
    ],
)
def test_a_wrong_kernel_is_named_with_what_avoids_it(monkeypatch, kind, kernel, remedy):
    module_type = ModuleType("chosen")
    utils = ModuleType("utils")
    vars(module_type).update(decision(kind))
    vars(utils)["get_cudnn_version"] = lambda: (9, 14, 0)
    monkeypatch.setitem(sys.modules, DECISION, module_type)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.utils", utils)
    named, messages = kernel_and_remedy(of_torch=False)
    assert named.endswith(kernel)
    assert remedy in messages
    # Caps and sinks run in torch beside TransformerEngine, which then chose for other layers.
    assert kernel_and_remedy(of_torch=True)[0] == f"torch {torch.__version__}"
