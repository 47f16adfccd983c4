"""Which settings a model that sees images excludes."""

from __future__ import annotations

from typing import Any

import pytest
from slipstream.protocol.settings.config_file import parse_config
from slipstream.protocol.settings.model_sizes import ModelSizes
from slipstream.protocol.settings.vision_rules import vision_problems

DECODER = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
SEEING = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
    **DECODER,
}
BLIND = {"architectures": ["Qwen3ForCausalLM"], **DECODER}
BASE: dict[str, Any] = {
    "run": {"name": "r", "dir": "runs", "steps": 2},
    "model": {"path": "model"},
    "algorithm": {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "learning_rate": 1e-5,
    },
    "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}


def problems(values: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    table = {**BASE}
    for name, section in changes.items():
        table[name] = {**table.get(name, {}), **section}
    return list(vision_problems(parse_config(table, source="test"), ModelSizes.of(values)))


def test_images_need_a_model_that_sees() -> None:
    assert problems(SEEING, {"sampling": {"max_images": 2}}) == []
    (problem,) = problems(BLIND, {"sampling": {"max_images": 2}})
    assert problem.startswith("sampling.max_images must be 0 for a Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learner": {"parallel": {"cp": 2}, "world_size": 2}}, "learner.parallel.cp must be 1"),
        ({"lora": {"rank": 4}}, "lora.rank must be 0"),
        ({"algorithm": {"router_replay": "rollout"}}, "algorithm.router_replay must be"),
        ({"rollout_server": {"drafts": "shared"}}, "rollout_server.drafts must be"),
        (
            {"rollout_server": {"quantization": "fp8_per_channel"}},
            "rollout_server.quantization must be",
        ),
        (
            {
                "algorithm": {"kl": {"coefficient": 0.1}},
                "reference": {"server": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            },
            "reference.server gets no images",
        ),
        ({"learner": {"recompute": "auto"}}, "learner.recompute must be"),
        ({"learner": {"transformer": FULL}}, "learner.transformer.recompute_granularity must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_sees_excludes_what_cannot_be_or_was_not_tested(
    changes: dict[str, Any], named: str
) -> None:
    found = problems(SEEING, changes)
    assert [problem for problem in found if problem.startswith(named)], found
    assert problems(BLIND, changes) == []
