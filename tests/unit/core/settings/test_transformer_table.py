"""Settings of Megatron's with which the policy would not be the one that samples."""

from typing import Any

import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.parallel_rules import FROM_MODEL, OFF, policy_problems

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"moe_expert_capacity_factor": 1.25},
        "learner.transformer.moe_expert_capacity_factor must be left out, got 1.25: rollout "
        "servers do not compute so, and the policy that is trained must be the one that samples",
    ),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing must be left out"),
    ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity must be"),
    ({"moe_token_dropping": True}, "moe_token_dropping must be left out, got True"),
    ({"moe_token_drop_policy": "position"}, "moe_token_drop_policy must be left out"),
    ({"attention_dropout": 0.1}, "attention_dropout must be left out, got 0.1"),
    ({"hidden_dropout": 0.1}, "hidden_dropout must be left out"),
    ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps must be left out"),
    ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias must be left out"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "must not be sinkhorn"),
    ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "must not be sinkhorn"),
    ({"softmax_scale": 0.5}, "softmax_scale cannot be set, got 0.5: config.json decides it"),
    ({"window_size": [128, 0]}, "window_size cannot be set, got [128, 0]"),
    ({"rotary_percent": 0.5}, "rotary_percent cannot be set"),
    ({"add_qkv_bias": False}, "add_qkv_bias cannot be set, got False"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_another_model_than_rollout_servers_sample_from_is_refused(
    table: dict[str, Any], message: str
) -> None:
    (found,) = policy_problems(table)
    assert message in found


def test_what_is_switched_off_and_what_is_only_a_loss_is_not_refused() -> None:
    off = {"attention_dropout": 0.0, "moe_router_force_load_balancing": False}
    losses = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"}
    assert list(policy_problems(off | losses | {"recompute_granularity": "full"})) == []


def test_no_name_is_in_both_lists() -> None:
    assert FROM_MODEL.isdisjoint(OFF)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("learner", r"learner\.transformer\.moe_expert_capacity_factor must be left out, got 1\.0"),
        ("critic", r"critic\.transformer\.moe_expert_capacity_factor must be left out, got 1\.0"),
    ],
)
def test_a_run_is_refused_when_its_settings_are_read(place: str, message: str) -> None:
    table: dict[str, Any] = {
        "run": {"name": "test", "steps": 2},
        "model": {"path": "model"},
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "learning_rate": 1e-3,
            "advantage": "gae",
        },
        "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 16},
        "critic": {"learning_rate": 1e-3},
        "learner": {},
    }
    table[place]["transformer"] = {"moe_expert_capacity_factor": 1.0}
    with pytest.raises(ConfigError, match=message):
        parse_config(table, source="test")
