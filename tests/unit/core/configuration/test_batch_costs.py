"""What a batch costs, by hand, and for models as they were published."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from slipstream.core.configuration import batch_bytes, batch_costs
from slipstream.core.configuration.batch_bytes import BatchBytes
from slipstream.core.configuration.batch_costs import BatchCosts
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from support.fakes.published_models import DEEPSEEK_V3, QWEN3_235B
from support.fakes.small_configs import small_config

RESULT = Path(__file__).parents[4] / "benchmarks" / "results" / "batches.json"
PARALLEL = {
    "tp": 4,
    "cp": 4,
    "pp": 2,
    "ep": 32,
    "etp": 1,
}
# 512 groups of 16, and 256 ranks.
LARGE: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16"},
    "algorithm": {
        "groups_per_step": 512,
        "group_size": 16,
        "router_replay": "rollout",
    },
    "sampling": {
        "max_reply_tokens": 8000,
        "max_episode_tokens": 8192,
    },
    "learner": {
        "world_size": 256,
        "ranks_per_node": 8,
        "micro_batch_tokens": 8192,
        "parallel": PARALLEL,
    },
    "rollout_server": {
        "tensor_parallel_size": 8,
        "count": 32,
    },
    "queue": {"max_bytes": 1 << 60},
}


class Plan(NamedTuple):
    config: Config
    num_bytes: BatchBytes
    costs: BatchCosts


def plan_of(folder: Path, **changes: dict[str, Any]) -> Plan:
    """Qwen3-235B-A22B by the settings `LARGE`, with changes by section."""
    (folder / "config.json").write_text(json.dumps(QWEN3_235B))
    sections = {}
    for name in {*LARGE, *changes}:
        sections[name] = LARGE.get(name, {}) | changes.get(name, {})
    sections["model"]["path"] = str(folder)
    config = small_config(**sections)
    sizes = read_model_sizes(folder)
    num_bytes = BatchBytes.of(config, sizes)
    costs = BatchCosts.of(config, sizes, num_bytes)
    return Plan(config, num_bytes, costs)


def test_the_figures_are_those_that_were_measured() -> None:
    measured = json.loads(RESULT.read_text())["figures"]
    for name, value in measured.items():
        figure = getattr(batch_costs, name, None) or getattr(batch_bytes, name)
        assert figure == pytest.approx(value, rel=0.05), name


def test_experts_of_a_large_mixture_cost_the_controller_more_than_training(
    tmp_path: Path,
) -> None:
    config, num_bytes, costs = plan_of(tmp_path)
    # 94 layers of 8 experts.
    assert num_bytes.experts_per_token == 752
    num_tokens = 8192 * 8192
    assert num_bytes.batch == 8192 * (2048 + (24 + 752) * 8192)
    by_number_s = 8192 * batch_costs.CONTROLLER_TRAJECTORY_S
    by_bytes_s = num_bytes.batch * batch_costs.CONTROLLER_BYTE_S
    assert costs.controller_s == pytest.approx(by_number_s + by_bytes_s)
    # 21.5 billion parameters multiply a token: the published 22 without the embedding.
    sizes = read_model_sizes(tmp_path)
    assert sizes.parameters == pytest.approx(235e9, rel=0.01)
    assert sizes.active_parameters == pytest.approx(21.5e9, rel=0.01)
    assert costs.training_s == pytest.approx(
        6 * sizes.active_parameters * num_tokens / (256 * 4e14)
    )
    (warning,) = costs.warnings(config, num_bytes)
    assert warning.endswith(
        'steps wait for the controller; set algorithm.router_replay = "off"'
    )
    a_day = num_bytes.batch * 86400 / costs.controller_s
    *_, last_line = costs.describe(num_bytes)
    assert last_line == f"the journal grows by at most {a_day / 1e12:,.1f} TB a day"


def test_a_plan_without_experts_waits_for_training(tmp_path: Path) -> None:
    config, num_bytes, costs = plan_of(tmp_path, algorithm={"router_replay": "off"})
    assert costs.training_s is not None
    assert costs.controller_s < 0.2 * costs.training_s
    assert [*costs.warnings(config, num_bytes)] == []


def test_the_parts_of_a_latent_mixture_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    sizes = read_model_sizes(tmp_path)
    # 58 layers with 256 experts of three matrices.
    assert sizes.expert_parameters == 3 * 7168 * 58 * 256 * 2048
    assert sizes.routing_bytes_per_token == 61 * 8 * 2


def test_a_rank_reads_all_tokens_and_all_experts(tmp_path: Path) -> None:
    _, _, costs = plan_of(tmp_path)
    tokens = 8192 * 8192
    expected_s = tokens * (
        batch_costs.RANK_TOKEN_S + 752 * batch_costs.RANK_EXPERTS_BYTE_S
    )
    assert costs.rank_s == pytest.approx(expected_s)


def test_a_model_for_cpus_has_no_estimate_of_training(tmp_path: Path) -> None:
    _, num_bytes, costs = plan_of(tmp_path, model={"dtype": "float32"})
    assert costs.training_s is None
    assert costs.least_step_s == costs.controller_s
    assert not [
        line for line in costs.describe(num_bytes) if line.startswith("training")
    ]


def test_adapters_train_in_two_thirds_of_the_operations(tmp_path: Path) -> None:
    _, _, whole = plan_of(tmp_path)
    _, _, adapted = plan_of(tmp_path, lora={"rank": 8})
    assert whole.training_s is not None
    assert adapted.training_s == pytest.approx(whole.training_s * 2 / 3)


def test_what_waits_grows_with_the_bound(tmp_path: Path) -> None:
    _, num_bytes, close = plan_of(tmp_path, algorithm={"max_staleness": 0})
    _, _, far = plan_of(tmp_path, algorithm={"max_staleness": 4})
    assert far.controller_bytes - close.controller_bytes == 4 * num_bytes.batch
