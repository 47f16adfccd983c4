import pytest
from slipstream.learner.trainer.flops import model_sizes, peak_tflops, training_flops

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


def test_a_dense_model_multiplies_with_all_matrices_but_the_embedding():
    sizes = model_sizes(LLAMA_3_8B)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert sizes.matrix_parameters == 32 * (attention + 3 * 4096 * 14336) + 4096 * 128256
    # 8.03 billion parameters, 0.53 of them in the embedding.
    assert sizes.matrix_parameters / 1e9 == pytest.approx(8.03 - 0.525, abs=0.01)
    assert sizes.attention_width == 32 * 4096


def test_a_mixture_of_experts_multiplies_with_the_chosen_experts_and_the_router():
    sizes = model_sizes(QWEN3_30B_A3B)
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    experts = 2048 * 128 + 8 * 3 * 2048 * 768
    assert sizes.matrix_parameters == 48 * (attention + experts) + 2048 * 151936
    # The model's name says 3.3 billion, the embedding included.
    assert (sizes.matrix_parameters + 2048 * 151936) / 1e9 == pytest.approx(3.35, abs=0.02)


SPARSE, DENSE = 2048 * 128 + 8 * 3 * 2048 * 768, 3 * 2048 * 6144
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model", "change", "more"),
    [
        # Layers without experts are dense.
        (QWEN3_30B_A3B, {"mlp_only_layers": [0, 1]}, 2 * (DENSE - SPARSE)),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, 24 * (DENSE - SPARSE)),
        # A shared expert is always active.
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 100}, 48 * 3 * 2048 * 100),
        # Mixtral names its experts otherwise.
        (LLAMA_3_8B, MIXTRAL, 32 * (3 * 4096 * 14336 + 8 * 4096)),
    ],
)
def test_a_mixture_multiplies_with_what_each_of_its_layers_has(model, change, more):
    assert (
        model_sizes(model | change).matrix_parameters - model_sizes(model).matrix_parameters == more
    )


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
    sizes = model_sizes(DEEPSEEK_V3)
    queries = 7168 * 1536 + 1536 * 128 * 192
    others = 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, experts = 3 * 7168 * 18432, 7168 * 256 + 9 * 3 * 7168 * 2048
    layers = 61 * (queries + others) + 3 * dense + 58 * experts
    assert sizes.matrix_parameters == layers + 7168 * 129280
    # arXiv:2412.19437 says 37 billion for each token, the embedding included.
    assert (sizes.matrix_parameters + 7168 * 129280) / 1e9 == pytest.approx(37.6, abs=1)
    assert sizes.attention_width == 61 * 128 * (192 + 128) // 2
    direct = model_sizes(DEEPSEEK_V3 | {"q_lora_rank": None})
    assert direct.matrix_parameters == sizes.matrix_parameters + 61 * (7168 * 128 * 192 - queries)


def test_flops_are_6_for_each_parameter_and_token_and_6_for_each_pair_below_the_diagonal():
    sizes = model_sizes(
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
    assert training_flops(sizes, [3, 5]) == 6 * 200 * 8 + 6 * 4 * (9 + 25)


def test_a_config_without_a_size_is_refused_by_its_name():
    with pytest.raises(KeyError, match="no number hidden_size"):
        model_sizes({})


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_known_of_some_devices_and_never_guessed(name: str, peak: float | None):
    assert peak_tflops(name) == peak


def test_sequence_of_the_attention_length_spends_half_of_its_flops_on_attention() -> None:
    sizes = model_sizes(LLAMA_3_8B)
    length = round(sizes.attention_length)
    attention = 6 * sizes.attention_width * length**2
    assert attention / training_flops(sizes, [length]) == pytest.approx(0.5, abs=1e-4)
