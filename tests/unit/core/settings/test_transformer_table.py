"""Settings of Megatron's with which the policy would not be the one that samples."""

from typing import Any

import pytest
from slipstream.core.settings.parallel_rules import (
    OFF,
    UNTRIED,
    comes_from_model,
    policy_problems,
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"moe_expert_capacity_factor": 1.25},
        "learner.transformer.moe_expert_capacity_factor must be left out, got 1.25: rollout "
        "servers do not compute so, and the policy that is trained must be the one that samples",
    ),
    ({"attention_dropout": 0.1}, "attention_dropout must be left out, got 0.1"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "must not be sinkhorn"),
    (
        {"moe_router_load_balancing_type": "quantile_balancing"},
        "must not be quantile_balancing",
    ),
    (
        {"mtp_detach_heads": True},
        "got True: nobody has shown that packed sequences are trained",
    ),
    (
        {"moe_router_load_balancing_type": "global_aux_loss"},
        "must not be global_aux_loss",
    ),
    (
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        "must not be sinkhorn",
    ),
    (
        {"softmax_scale": 0.5},
        "softmax_scale cannot be set, got 0.5: config.json decides it",
    ),
    ({"window_size": [128, 0]}, "window_size cannot be set, got [128, 0]"),
    (
        {"yarn_mscale": 1.0},
        "yarn_mscale cannot be set, got 1.0: config.json decides it",
    ),
    ({"add_qkv_bias": False}, "add_qkv_bias cannot be set, got False"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_another_model_than_rollout_servers_sample_from_is_refused(table, message):
    (problem,) = policy_problems(table)
    assert message in problem


def test_what_is_switched_off_and_what_is_only_a_loss_is_not_refused() -> None:
    off = {"attention_dropout": 0.0, "moe_router_force_load_balancing": False}
    losses = {
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }
    assert list(policy_problems(off | losses | {"recompute_granularity": "full"})) == []


def test_no_name_is_in_two_lists() -> None:
    assert not any(map(comes_from_model, OFF | UNTRIED))
    assert UNTRIED.isdisjoint(OFF)
