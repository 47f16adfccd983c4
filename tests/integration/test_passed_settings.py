"""Settings that are passed through arrive in Megatron's objects, or are refused by name."""

import json
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.settings.parallel_rules import (
    _NOT_OURS,
    FROM_MODEL,
    OFF,
    UNTRIED,
    comes_from_model,
)
from slipstream.learner.trainer.model.recipe import OWNED, check_optimizer
from support.fakes.parity_models import make_models
from support.fakes.small_configs import small_config
from support.ranks import settings_ranks
from support.ranks.rank_pool import RankPool
from support.ranks.settings_ranks import PASSED, REFUSED

# Fields of Megatron's model that `learner.transformer` may set as it likes. They say how fast, in
# which memory and with which rounding the same function is computed, what a loss beside the
# objective weighs, or how the ranks share the work.
FREE_FIELDS = Path(__file__).parents[1] / "data" / "free_megatron_fields.txt"

# Fields of the other tables that have an effect with Adam, alone or beside another of them.
FREE = {
    "ddp": """
        align_param_gather bucket_size fp4_param_gather fp8_param_gather grad_reduce_in_fp32
        num_buckets num_distributed_optimizer_instances
        overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw
        param_name_patterns_for_fp32_local_accumulation reduce_scatter_with_fp32_accumulation
        reuse_grad_buf_for_mxfp8_param_ag
    """,
    "optimizer": """
        adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm decoupled_lr decoupled_weight_decay
        exp_avg_dtype exp_avg_sq_dtype fp8_recipe main_grads_dtype main_params_dtype optimizer
        reuse_grad_buf_for_mxfp8_param_ag store_param_remainders
    """,
}


@pytest.fixture(scope="module")
def answers(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    make_models(folder)
    jobs = ["passed", "mixture", "names", *REFUSED]
    rank_pool.run(Path(settings_ranks.__file__), jobs, world_size=1, folder=folder)
    return folder


@pytest.mark.parametrize("section", PASSED)
def test_passed_values_are_those_of_megatrons_objects(
    section: str, answers: Path
) -> None:
    parsed = json.loads((answers / "passed.json").read_text())
    assert parsed[section] == PASSED[section]
    assert parsed["router"] == "fp64"


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_checked_without_weights(case: str, answers: Path) -> None:
    message = REFUSED[case][1]
    parsed = json.loads((answers / f"{case}.json").read_text())
    assert message in parsed
    assert bool(parsed) == bool(message)
    assert "\n" not in parsed


def test_every_field_of_megatrons_model_is_free_owned_or_refused(answers: Path) -> None:
    """A new version may have fields that change what the policy computes."""
    names = set(json.loads((answers / "names.json").read_text())["transformer"])
    free = set(FREE_FIELDS.read_text().split())
    refused = {name for name in names if comes_from_model(name)} | OFF | UNTRIED
    assert names - (free | OWNED.keys() | refused) == set()
    assert (free | FROM_MODEL | refused) - names == set()
    assert free.isdisjoint(OWNED.keys() | refused)


@pytest.mark.parametrize("table", FREE)
def test_every_other_field_is_owned_or_refused_or_has_an_effect(
    table: str, answers: Path
) -> None:
    """A new version may have fields that the trainer's loop does not read."""

    def is_told(name: str) -> bool:
        if name in OWNED or name.startswith(_NOT_OURS[table]):
            return True
        try:
            if table == "optimizer":
                section = {"optimizer": {name: "a value"}}
                check_optimizer(small_config(learner=section), {"optimizer": "adam"})
        except ConfigError as error:
            return name in str(error)
        return False

    names = json.loads((answers / "names.json").read_text())[table]
    assert [name for name in names if not is_told(name)] == FREE[table].split()


def test_experts_are_chosen_in_float32_and_by_the_objective_alone(
    answers: Path,
) -> None:
    assert json.loads((answers / "mixture.json").read_text()) == {
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": False,
    }
