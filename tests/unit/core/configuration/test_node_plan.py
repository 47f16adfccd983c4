"""What a run chooses for the GPUs of one machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.launch.placement import FURTHER_EPISODES
from slipstream.core.configuration.automatic import completed, describe_plan
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.configuration.node_plan import (
    Division,
    ModelSpeed,
    NodeGpus,
    NodePlan,
    divide_gpus,
    plan_node,
    rank_state_bytes,
)
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config

H200_BYTES = 150_000_000_000
QWEN_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QWEN_8B = QWEN_06B | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
SPEED = ModelSpeed(trained_token_s=1e-5, engine_step_s=4e-3, sampled_token_s=1e-5)


def config_for(
    folder: Path, gpus: NodeGpus | None, model: dict[str, Any] = QWEN_06B, **tables: Any
) -> Config:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(model))
    table: dict[str, Any] = {
        "run": {"steps": 90, "dir": str(folder)},
        "model": {
            "path": str(folder / "model"),
            "dtype": tables.pop("dtype", "bfloat16"),
        },
        "environments": [{"reference": "a.b:Sums"}],
        "sampling": {"max_reply_tokens": 1024},
    }
    return Config.model_validate(completed(table | tables, gpus=gpus))


def divided(config: Config) -> NodePlan:
    algorithm = config.algorithm
    return NodePlan(
        world_size=config.learner.world_size,
        num_servers=config.rollout_server.count,
        episodes_per_step=algorithm.groups_per_step * algorithm.group_size,
        max_staleness=algorithm.max_staleness,
        tensor_parallel=config.learner.parallel.tp,
    )


def test_a_step_takes_as_long_as_the_slower_of_training_and_generation() -> None:
    # 300 episodes of 100 tokens: 30,000 tokens.
    plan = NodePlan(world_size=3, num_servers=1, episodes_per_step=300, max_staleness=2)
    # 85 ms and 30,000 tokens of 10 us on three ranks.
    assert SPEED.training_s(plan, 300) == pytest.approx(0.185)
    # 30,000 tokens of 10 us, and 300 engine steps of 4 ms in three training steps.
    assert SPEED.step_s(plan, 300) == pytest.approx(0.3 + 0.4)
    assert SPEED.wait_share(plan, 300) == pytest.approx(1 - 0.185 / 0.7)
    assert SPEED.tokens_per_s(plan, 300) == pytest.approx(30_000 / 0.7)
    fast_fleet = NodePlan(
        world_size=1, num_servers=100, episodes_per_step=300, max_staleness=99
    )
    assert SPEED.step_s(fast_fleet, 300) == pytest.approx(0.385)
    assert SPEED.wait_share(fast_fleet, 300) == 0


def test_a_bound_is_raised_before_a_batch_and_neither_without_need() -> None:
    def chosen(longest_reply_tokens: int) -> tuple[int, int]:
        plan = plan_node(
            division=Division(),
            speed=SPEED,
            longest_reply_tokens=longest_reply_tokens,
            episodes_per_step=(128, 256),
            max_staleness=(2, 4),
        )
        return plan.episodes_per_step, plan.max_staleness

    assert chosen(16) == (128, 2)
    assert chosen(200) == (128, 4)
    assert chosen(1024) == (256, 4)


def test_a_stated_batch_and_bound_are_the_only_ones(tmp_path: Path) -> None:
    two = NodeGpus(2, H200_BYTES)
    stated_bound = config_for(tmp_path, two, algorithm={"max_staleness": 1})
    assert divided(stated_bound) == NodePlan(1, 1, 256, 1)
    stated_batch = config_for(tmp_path, two, algorithm={"groups_per_step": 3})
    assert divided(stated_batch) == NodePlan(1, 1, 24, 4)
    stated_division = config_for(
        tmp_path,
        NodeGpus(8, H200_BYTES),
        learner={"world_size": 2},
        rollout_server={"count": 3},
    )
    assert divided(stated_division) == NodePlan(2, 3, 512, 4)


@pytest.mark.parametrize(
    ("count", "model", "plan"),
    [
        (1, QWEN_06B, NodePlan(1, 1, 128, 2)),
        (2, QWEN_06B, NodePlan(1, 1, 256, 4)),
        (4, QWEN_06B, NodePlan(2, 2, 512, 4)),
        (8, QWEN_06B, NodePlan(3, 5, 512, 4)),
        # Two ranks are the fewest with room for the state of 8 billion parameters.
        (4, QWEN_8B, NodePlan(3, 1, 512, 2)),
        (8, QWEN_8B, NodePlan(5, 3, 512, 2)),
    ],
)
def test_more_gpus_take_more_ranks_servers_and_episodes(
    count: int, model: dict[str, Any], plan: NodePlan, tmp_path: Path
) -> None:
    assert divided(config_for(tmp_path, NodeGpus(count, H200_BYTES), model)) == plan


def test_each_rank_has_room_for_its_share_of_the_state() -> None:
    sizes = ModelSizes.of(QWEN_8B)
    speed = ModelSpeed.of(sizes, workers=1, longest_reply_tokens=1024)
    for memory_bytes in (100e9, 150e9):
        division = divide_gpus(NodeGpus(8, int(memory_bytes)), sizes, speed, workers=2)
        assert sizes.parameters * (6 + 12 / division.world_size) <= 0.7 * memory_bytes
        assert division.world_size + 2 * division.num_servers <= 8
    # Four ranks need 9 bytes a parameter, which 60 GB do not have: a user divides such a model.
    assert divide_gpus(NodeGpus(4, int(60e9)), sizes, speed, workers=1) == Division()


def test_ranks_share_matrices_where_replicas_have_no_room(tmp_path: Path) -> None:
    # Seven replicas of 8 billion parameters need 7.7 bytes a parameter, 63 GB; pairs with two
    # replicas need 6 bytes of half of them.
    small = NodeGpus(8, 85_900_000_000)
    config = config_for(tmp_path, small, QWEN_8B)
    assert divided(config) == NodePlan(6, 2, 512, 4, tensor_parallel=2)
    sizes = ModelSizes.of(QWEN_8B)
    state_bytes = rank_state_bytes(sizes, 6, 2)
    assert state_bytes == sizes.parameters / 2 * (6 + 12 / 3)
    assert state_bytes <= 0.7 * small.memory_bytes
    assert sizes.parameters * (6 + 12 / 7) > 0.7 * small.memory_bytes


def test_only_sizes_that_model_and_options_allow_are_taken(tmp_path: Path) -> None:
    small = NodeGpus(8, 85_900_000_000)
    # Three heads of keys and values cannot be divided.
    odd = QWEN_8B | {
        "num_attention_heads": 33,
        "num_key_value_heads": 3,
    }
    assert divided(config_for(tmp_path, small, odd)).tensor_parallel == 1
    learner = {
        "parallel": {"tp": 4},
        "world_size": 4,
    }
    stated = config_for(
        tmp_path,
        small,
        QWEN_8B,
        learner=learner,
    )
    assert divided(stated).tensor_parallel == 4
    assert "learner.parallel.tp" not in stated.automatic
    # Bits of learner and engine agree on one rank alone.
    bits = config_for(
        tmp_path,
        small,
        QWEN_8B,
        algorithm={"agreement": "bits"},
    )
    assert divided(bits).tensor_parallel == 1


def test_plans_are_for_16_bits_dense_models_and_whole_runs_on_gpus(
    tmp_path: Path,
) -> None:
    eight = NodeGpus(8, H200_BYTES)
    unplanned = NodePlan(1, 1, 128, 2)
    assert divided(config_for(tmp_path, None)) == unplanned
    assert divided(config_for(tmp_path, eight, dtype="float32")) == unplanned
    client_loop = config_for(
        tmp_path,
        eight,
        controller={"client_loop": True},
        environments=[],
        learner={"shared_prefix_tokens": 0},
    )
    assert client_loop.learner.world_size == 1
    mixture = QWEN_06B | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3072,
    }
    assert config_for(tmp_path, eight, mixture).learner.world_size == 1


def test_a_run_that_goes_on_keeps_its_plan_on_another_machine(tmp_path: Path) -> None:
    config = config_for(tmp_path, NodeGpus(2, H200_BYTES))
    config.run_dir.mkdir()
    (config.run_dir / "config.toml").write_text(dump_config(config))
    assert divided(config_for(tmp_path, NodeGpus(8, H200_BYTES))) == divided(config)
    # A run that began without a plan goes on without one.
    unplanned = config_for(tmp_path, None)
    (config.run_dir / "config.toml").write_text(dump_config(unplanned))
    assert divided(config_for(tmp_path, NodeGpus(8, H200_BYTES))) == divided(unplanned)


def test_each_choice_of_a_plan_is_told_with_its_reason(tmp_path: Path) -> None:
    assert describe_plan(config_for(tmp_path, None)) == []
    (of_step,) = describe_plan(config_for(tmp_path, NodeGpus(2, H200_BYTES)))
    assert of_step == (
        "256 episodes a step and max_staleness 4: by the speed of H200s, with replies of up to "
        "1,024 tokens, the trainer would wait for replies for 48% of a step"
    )
    small = NodeGpus(8, 85_900_000_000)
    ranks, servers, _ = describe_plan(config_for(tmp_path, small, QWEN_8B))
    assert ranks == (
        "learner.world_size 6, tp 2 and dp 3: the smallest tp with room for a rank's state, "
        "41.0 GB of 8.2 billion parameters"
    )
    assert servers.startswith(
        "rollout_server.count 2, tensor_parallel_size 1: the division of "
    )
    assert " ranks would train 48," in servers


def test_a_plan_leaves_the_second_server_room_beside_the_first(tmp_path: Path) -> None:
    config = config_for(tmp_path, NodeGpus(2, H200_BYTES))
    beside = config.rollout_server.max_episodes * FURTHER_EPISODES // 16
    episodes_per_step = divided(config).episodes_per_step
    assert episodes_per_step <= config.rollout_server.max_episodes - beside
