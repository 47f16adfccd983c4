import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slipstream.learner.trainer.step_cost import PEAK_TFLOPS, Arithmetic, StepCost
from support.fakes.small_configs import small_config

from benchmarks.common.shapes import SHAPES

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


def test_a_mixture_of_experts_multiplies_with_the_chosen_experts_and_the_router():
    sizes = Arithmetic.of(QWEN3_30B_A3B)
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    experts = 2048 * 128 + 8 * 3 * 2048 * 768
    assert sizes.matrix_parameters == 48 * (attention + experts) + 2048 * 151936
    # The model's name says 3.3 billion, the embedding included.
    assert (sizes.matrix_parameters + 2048 * 151936) / 1e9 == pytest.approx(
        3.35, abs=0.02
    )


SPARSE = 2048 * 128 + 8 * 3 * 2048 * 768
DENSE = 3 * 2048 * 6144
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model", "change", "more"),
    [
        # The first layers of some families are dense.
        (QWEN3_30B_A3B, {"first_k_dense_replace": 2}, 2 * (DENSE - SPARSE)),
        # A shared expert is always active.
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 100}, 48 * 3 * 2048 * 100),
        # MiniMax M2 and gpt-oss name their experts otherwise.
        (LLAMA_3_8B, LOCAL, 32 * (3 * 4096 * 14336 + 8 * 4096)),
    ],
)
def test_a_mixture_multiplies_with_what_each_of_its_layers_has(model, change, more):
    before = Arithmetic.of(model)
    after = Arithmetic.of(model | change)
    assert after.matrix_parameters - before.matrix_parameters == more


DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_latent_attention_multiplies_with_both_matrices_of_queries_and_of_keys_and_values():
    sizes = Arithmetic.of(DEEPSEEK_V3)
    queries = 7168 * 1536 + 1536 * 128 * 192
    other_weights = 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = 3 * 7168 * 18432
    experts = 7168 * 256 + 9 * 3 * 7168 * 2048
    layers = 61 * (queries + other_weights) + 3 * dense + 58 * experts
    assert sizes.matrix_parameters == layers + 7168 * 129280
    # arXiv:2412.19437 says 37 billion for each token, the embedding included.
    assert (sizes.matrix_parameters + 7168 * 129280) / 1e9 == pytest.approx(37.6, abs=1)
    assert sizes.attention_width == 61 * 128 * (192 + 128) // 2
    direct = Arithmetic.of(DEEPSEEK_V3 | {"q_lora_rank": None})
    assert direct.matrix_parameters == sizes.matrix_parameters + 61 * (
        7168 * 128 * 192 - queries
    )


def test_flops_are_6_for_each_parameter_and_token_and_6_for_each_pair_below_the_diagonal():
    sizes = Arithmetic.of(
        {
            "hidden_size": 4,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 10,
        }
    )
    # Four matrices of 4 x 4, three of 4 x 8, one of 4 x 10.
    assert sizes.matrix_parameters == 64 + 96 + 40
    assert sizes.training_flops([3, 5]) == 6 * 200 * 8 + 6 * 4 * (9 + 25)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_of_benchmarks_are_counted_by_their_tensors(name: str) -> None:
    shape = SHAPES[name]
    sizes = Arithmetic.of(shape.config("bfloat16", 4096))
    matrices = {key: math.prod(size) for key, size in shape.tensors() if len(size) == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    assert sizes.matrix_parameters == sum(matrices.values()) + embedding * shape.tied
    assert sizes.attention_width == shape.layers * shape.heads * shape.head_dim


def test_the_peak_of_a_device_is_known_by_its_whole_name() -> None:
    assert PEAK_TFLOPS["NVIDIA H200"] == PEAK_TFLOPS["NVIDIA H100 80GB HBM3"] == 989.4
    # Other versions have other clocks.
    assert not PEAK_TFLOPS.keys() & {
        "NVIDIA H200 NVL",
        "NVIDIA GB200",
        "NVIDIA H100 NVL",
    }


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_model_with_delta_nets_has_no_flops(is_delta: bool, tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kind = "Qwen3NextForCausalLM" if is_delta else "Qwen3ForCausalLM"
    table = QWEN3_30B_A3B | {"architectures": [kind]} | (heads if is_delta else {})
    (tmp_path / "config.json").write_text(json.dumps(table))
    ranks = SimpleNamespace(
        device=torch.device("cpu"), world_size=2, max=lambda values: values
    )
    policy: Any = SimpleNamespace(ranks=ranks, sharing=None)
    batch: Any = SimpleNamespace(lengths=[3, 5])
    result: Any = SimpleNamespace(wall_s=2.0, metrics={"num_micro_batches": 4.0})
    metrics = StepCost(small_config(model={"path": str(tmp_path)}), policy).metrics(
        batch,
        wall_s=result.wall_s,
        num_micro_batches=result.metrics["num_micro_batches"],
    )
    assert metrics["tokens_per_micro_batch"] == 2.0
    assert ("model_flops" in metrics) == (not is_delta)
    if not is_delta:
        flops = Arithmetic.of(table).training_flops([3, 5])
        assert metrics["tflops_per_rank"] == pytest.approx(flops / 2.0 / 2 / 1e12)
