"""The line that says which attention runs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from slipstream.learner.trainer.model.attention_choice import describe, log_attention_once

PARAMETERS = {
    "qkv_layout": "thd_thd_thd",
    "qkv_dtype": "torch.bfloat16",
    "context_parallel": False,
    "cp_comm_type": "p2p",
    "deterministic": False,
}


def decision(kind: str | None, **changes: object) -> dict:
    found = dict.fromkeys(
        ("use_flash_attention", "use_fused_attention", "use_unfused_attention"), False
    )
    if kind is not None:
        found[kind] = True
    parameters = SimpleNamespace(**PARAMETERS | changes)
    return {"_attention_backends": found | {"attention_params": parameters}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (decision("use_fused_attention"), "fused attention (cuDNN), thd_thd_thd bfloat16"),
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
def test_decision_of_transformer_engine_is_one_line(found: dict, expected: str) -> None:
    assert describe(found) == expected


def test_attention_of_torch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    log_attention_once.cache_clear()
    with caplog.at_level(logging.INFO):
        log_attention_once()
        log_attention_once()
    assert caplog.messages == ["attention: torch's scaled_dot_product_attention"]
