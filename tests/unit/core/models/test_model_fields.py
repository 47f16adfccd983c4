"""Fields of config.json with which learner, vLLM and transformers would not compute alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.configuration.config_file import check_model, model_warnings
from slipstream.core.errors import ConfigError
from slipstream.core.models.families import FAMILIES
from slipstream.core.models.model_fields import (
    HARMLESS,
    HONOURED,
    ONE_VALUE,
    field_problems,
    unknown_fields,
)
from slipstream.core.models.model_sizes import read_model_table
from support.fakes.model_folders import write_loadable_files
from support.fakes.small_configs import config_with, refusals

TEXT = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral")
LATER = (
    "Gemma3",
    "Glm4Moe",
    "DeepseekV3",
    "GptOss",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
)
LATEST = ("Glm4MoeLite", "MiniMaxM2", "SmolLM3")
LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL = (f"{name}ForCausalLM" for name in TEXT)
GEMMA3, GLM, DEEPSEEK, GPT_OSS, QWEN3_NEXT, QWEN35, QWEN35_MOE = (
    f"{name}ForCausalLM" for name in LATER
)
GLM_LITE, MINIMAX, SMOLLM3 = (f"{name}ForCausalLM" for name in LATEST)
KIMI25 = "KimiK25ForConditionalGeneration"
SEEING = [
    f"{name}ForConditionalGeneration"
    for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
]
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


# Fields that a config.json of this class must have.
GPT_OSS_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0}
WRITTEN = {
    DEEPSEEK: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    KIMI25: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    GPT_OSS: {"rope_parameters": GPT_OSS_YARN},
    GLM_LITE: {"first_k_dense_replace": 1},
    MINIMAX: {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "rotary_dim": 8,
        "head_dim": 16,
    },
    SEEING[2]: {"norm_topk_prob": True},
}
# Positions of a Qwen3.5 with heads of 256 dimensions, a quarter of which is turned.
AXES = {
    "rope_type": "default",
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
LATENT_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}


def without(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name}


# architecture, what config.json says, part of the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        LLAMA,
        {"attention_bias": True},
        "attention_bias of a LlamaForCausalLM must be left out or f",
    ),
    (QWEN3, {"attention_bias": True}, "attention_bias of a Qwen3ForCausalLM must be"),
    (
        LLAMA,
        {"hidden_act": "gelu"},
        "hidden_act of a LlamaForCausalLM must be 'silu', got 'gelu'",
    ),
    (
        LLAMA,
        {"logit_scale": 0.5},
        "logit_scale of a LlamaForCausalLM must be left out or 1, got 0",
    ),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "must be 1, got 0.5"),
    (
        QWEN3_MOE,
        {"num_experts": 8, "num_local_experts": 4},
        "the same number, got 8 and 4",
    ),
    (
        QWEN3_MOE,
        {"shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size",
    ),
    (
        QWEN2,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "got 'sliding_attention'",
    ),
    (
        QWEN2,
        {"head_dim": 32},
        "must be hidden_size / num_attention_heads = 16, as rollout servers",
    ),
    (
        LLAMA,
        {"rope_parameters": {"mrope_section": [1]}},
        "mrope_section in rope_parameters is not",
    ),
    (
        QWEN2,
        {"rope_parameters": {"factor": 2.0}},
        "factor in rope_parameters is not computed with",
    ),
    (
        QWEN3,
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "full_attention in",
    ),
    (
        LLAMA,
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 2.0}},
        "which differ",
    ),
    (
        LLAMA,
        {"rope_parameters": LLAMA3, "rope_theta": 1e4},
        "rope_theta is 10000.0 in config.json",
    ),
    (
        LLAMA,
        {"rope_parameters": without(LLAMA3, "factor")},
        "needs factor in rope_parameters",
    ),
    (LLAMA, {"rope_parameters": YARN | {"factor": None}}, "'yarn' needs factor"),
    (
        LLAMA,
        {"rope_parameters": YARN, "max_position_embeddings": 1025},
        "must be at most factor * original_max_position_embeddings = 1024, for which",
    ),
    (
        LLAMA,
        {"rope_parameters": YARN | {"mrope_section": [1]}},
        "mrope_section in rope_parameters",
    ),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob"),
    (GLM, {"scoring_func": "softmax"}, "scoring_func"),
    (
        GLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "must be default, got 'lin",
    ),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
    (DEEPSEEK, {"topk_method": "group_limited_greedy"}, "topk_method"),
    (
        DEEPSEEK,
        {"scoring_func": None},
        "scoring_func of a DeepseekV3ForCausalLM must be 'sigmoid'",
    ),
    (DEEPSEEK, {"rms_norm_eps": 0.01}, "rms_norm_eps"),
    (
        DEEPSEEK,
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
        "num_experts_per_tok must be 2 * topk_group",
    ),
    (
        DEEPSEEK,
        {"rope_scaling": LATENT_YARN | {"mscale": 0.7}},
        "the same number without an atten",
    ),
    (
        DEEPSEEK,
        {"rope_scaling": LATENT_YARN | {"attention_factor": 1.0}},
        "attention_factor, got 1",
    ),
    (
        KIMI25,
        {"num_nextn_predict_layers": 1},
        "num_nextn_predict_layers of a KimiK25ForCond",
    ),
    (
        KIMI25,
        {"tie_word_embeddings": True},
        "tie_word_embeddings of a KimiK25ForConditional",
    ),
    (KIMI25, {"rms_norm_eps": 0.01}, "rms_norm_eps"),
    (
        KIMI25,
        {"rope_scaling": LATENT_YARN | {"mscale": 0.7}},
        "the same number without an attent",
    ),
    (
        GPT_OSS,
        {"swiglu_limit": 6.0},
        "swiglu_limit of a GptOssForCausalLM must be left out or 7.0",
    ),
    (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    (GPT_OSS, {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    (GPT_OSS, {"attention_bias": False}, "attention_bias"),
    (GPT_OSS, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    (
        GPT_OSS,
        {"layer_types": ["full_attention"]},
        "must alternate from sliding_attention on, as",
    ),
    (
        GPT_OSS,
        {"layer_types": ["sliding_attention"] * 2},
        "got 'sliding_attention' for layer 1",
    ),
    (
        GPT_OSS,
        {"rope_parameters": {"rope_type": "default"}},
        "one of yarn, got 'default'",
    ),
    (GPT_OSS, {"rope_parameters": YARN | {"beta_fast": 32.0}}, "needs beta_slow"),
    (
        GPT_OSS,
        {"rope_parameters": GPT_OSS_YARN | {"mscale": 1.0}},
        "mscale in rope_parameters is",
    ),
    (QWEN3_NEXT, {"layer_types": ["sliding_attention"]}, "got 'sliding_attention'"),
    (QWEN3_NEXT, {"rope_scaling": YARN}, "must be default, got 'yarn'"),
    (
        GLM_LITE,
        {"first_k_dense_replace": 2},
        "first_k_dense_replace of a Glm4MoeLiteForCausalLM",
    ),
    (
        GLM_LITE,
        {"mlp_layer_types": ["dense", "dense", "sparse"]},
        "must be dense for the first 1 la",
    ),
    (GLM_LITE, {"mlp_layer_types": ["sparse", "sparse"]}, "got ['sparse', 'sparse']"),
    (
        GLM_LITE,
        {"rope_scaling": LATENT_YARN | {"mscale": 0.7}},
        "mscale_all_dim of latent attent",
    ),
    (GLM_LITE, {"norm_topk_prob": False}, "norm_topk_prob"),
    *(
        (architecture, {"tie_word_embeddings": True}, "tie_word_embeddings")
        for architecture in (GLM_LITE, MINIMAX)
    ),
    (
        MINIMAX,
        {"use_routing_bias": False},
        "use_routing_bias of a MiniMaxM2ForCausalLM must be",
    ),
    (
        MINIMAX,
        {"scoring_func": "softmax"},
        "scoring_func of a MiniMaxM2ForCausalLM must be 'sig",
    ),
    (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type"),
    (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size"),
    (
        MINIMAX,
        {"rotary_dim": None},
        "must be the number of turned dimensions of its 16 in a head",
    ),
    (
        MINIMAX,
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "got 8 and a part of 0.25",
    ),
    (LLAMA, {"rotary_dim": 8}, "rotary_dim of a LlamaForCausalLM must be left out"),
    (QWEN3_NEXT, {"attn_output_gate": False}, "attn_output_gate of a Qwen3Next"),
    (
        QWEN35,
        {"attn_output_gate": False},
        "attn_output_gate of a Qwen3_5ForCausalLM must be left",
    ),
    (QWEN35, {"layer_types": ["sliding_attention"]}, "got 'sliding_attention'"),
    (QWEN35, {"rope_scaling": YARN}, "must be default, got 'yarn'"),
    (
        QWEN35_MOE,
        {"norm_topk_prob": False},
        "norm_topk_prob of a Qwen3_5MoeForCausalLM must be",
    ),
    *(
        (architecture, {"rope_parameters": AXES | change}, message)
        for architecture in SEEING[3:]
        for change, message in (
            ({"mrope_interleaved": False}, "mrope_interleaved of a Qwen3_5"),
            (
                {"mrope_section": [24, 20, 20]},
                "half of the turned part of a head, 32, got [24",
            ),
            (
                {"partial_rotary_factor": 0.5},
                "half of the turned part of a head, 64, got [11",
            ),
            ({"mrope_section": [16, 16]}, "must be three numbers"),
        )
    ),
    (MISTRAL, {"use_sliding_window": False}, "use_sliding_window"),
    (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation"),
    (GEMMA3, {"tie_word_embeddings": False}, "tie_word_embeddings"),
    (GEMMA3, {"layer_types": ["chunked_attention"]}, "got 'chunked_attention'"),
    (GEMMA3, {"rope_parameters": YARN}, "must be one of default, linear, got 'yarn'"),
    (
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"factor": 2.0},
                "sliding_attention": {},
            }
        },
        "factor in rope_parameters",
    ),
    (
        QWEN2,
        {"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
        "the rope_type 'llama3' needs original_max_position_embeddings",
    ),
]


@pytest.mark.parametrize(("architecture", "change", "message"), REFUSED)
def test_fields_that_are_not_computed_alike_are_refused(architecture, change, message):
    values = {
        "architectures": [architecture],
        **SIZES,
        **WRITTEN.get(architecture, {}),
        **change,
    }
    (problem,) = field_problems(values)
    assert message in problem
    assert unknown_fields(values) == []


# Fields that change nothing, or is computed with everywhere.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *(
        (architecture, {"rope_parameters": LLAMA3})
        for architecture, family in FAMILIES.items()
        if len(family.layer_kinds) == 1
        and architecture not in (GLM, GLM_LITE, DEEPSEEK, KIMI25, MINIMAX, *SEEING)
    ),
    *(
        (architecture, {"rope_scaling": {kind: name, "mrope_section": [16, 24, 24]}})
        for architecture in SEEING[:3]
        for kind, name in (("type", "mrope"), ("rope_type", "default"))
    ),
    (GLM, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    (GLM, {"partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True}),
    (
        GLM,
        {
            "n_routed_experts": 160,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    (
        GLM,
        {
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    (DEEPSEEK, {"rope_scaling": LATENT_YARN, "q_lora_rank": 1536, "kv_lora_rank": 512}),
    (DEEPSEEK, {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}),
    (DEEPSEEK, {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "seq_aux": True}),
    # Fields with which these were published.
    (DEEPSEEK, {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "ep_size": 1}),
    (
        DEEPSEEK,
        {"moe_layer_freq": 1, "aux_loss_alpha": 0.001, "num_nextn_predict_layers": 0},
    ),
    (
        KIMI25,
        {"media_placeholder_token_id": 163605, "ignore_index": -100, "n_group": 1},
    ),
    (KIMI25, {"use_unified_vision_chunk": True, "video_placeholder": "<video>"}),
    (
        GLM_LITE,
        {"partial_rotary_factor": 1.0, "topk_method": "noaux_tc", "rms_norm_eps": 1e-5},
    ),
    (
        GLM_LITE,
        {"num_nextn_predict_layers": 1, "n_group": 1, "routed_scaling_factor": 1.8},
    ),
    (
        GLM_LITE,
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "rope_interleave": True},
    ),
    (
        MINIMAX,
        {"qk_norm_type": "per_layer", "use_qk_norm": True, "attn_type_list": [1, 1]},
    ),
    (MINIMAX, {"num_mtp_modules": 3, "use_mtp": True, "mtp_transformer_layers": 1}),
    (
        MINIMAX,
        {
            "layernorm_mlp_beta": 1.0,
            "mlp_intermediate_size": 8192,
            "sliding_window": None,
        },
    ),
    (MINIMAX, {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}),
    (
        MINIMAX,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    (SMOLLM3, {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}),
    (
        GPT_OSS,
        {"rope_parameters": GPT_OSS_YARN | {"truncate": False}, "swiglu_limit": 7.0},
    ),
    (
        GPT_OSS,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
    ),
    (
        GPT_OSS,
        {
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "attention_bias": True,
        },
    ),
    (QWEN3_NEXT, {"linear_num_value_heads": 32, "linear_num_key_heads": 16}),
    *(
        (architecture, {"rope_parameters": AXES, "head_dim": 256})
        for architecture in (QWEN35, *SEEING[3:])
    ),
    # Fields with which Qwen3.5 was published.
    *(
        (
            architecture,
            {
                "attn_output_gate": True,
                "mtp_num_hidden_layers": 1,
                "mamba_ssm_dtype": "float32",
            },
        )
        for architecture in (QWEN35, QWEN35_MOE)
    ),
    (QWEN35, {"mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}),
    (QWEN35, {"full_attention_interval": 4, "layer_types": ["linear_attention"]}),
    (QWEN3_NEXT, {"full_attention_interval": 4, "partial_rotary_factor": 0.25}),
    (QWEN3_NEXT, {"layer_types": ["linear_attention", "full_attention"]}),
    (
        LLAMA,
        {"rope_parameters": YARN | {"beta_fast": 8}, "max_position_embeddings": 1024},
    ),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (MISTRAL, {"sliding_window": 4096}),
    (
        GEMMA3,
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    ),
    (
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ),
    (
        GEMMA3,
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 9,
        },
    ),
    *(
        (
            architecture,
            {"rope_scaling": without(LLAMA3, "rope_theta"), "rope_theta": 5e5},
        )
        for architecture in (LLAMA,)
    ),
    (
        LLAMA,
        {"attention_bias": False, "mlp_bias": False, "logit_scale": 1.0, "bias": None},
    ),
    # Fields with which SmolLM2 and a distilled Qwen2 were published.
    (
        LLAMA,
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {},
        },
    ),
    (QWEN2, {"use_mrope": False, "sliding_window": 4096, "use_sliding_window": False}),
    # Fields that transformers takes over from a GGUF file, as `make smollm2` does.
    (
        LLAMA,
        {"_model_name_or_path": "Smollm2 135M", "unk_token_id": 0, "pretraining_tp": 1},
    ),
    (
        LLAMA,
        {"head_dim": 32, "rope_scaling": None, "rope_theta": 1e6, "pretraining_tp": 2},
    ),
    (
        QWEN2,
        {"attention_bias": True, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    ),
    (
        QWEN2,
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
    ),
    (QWEN3_MOE, {"num_experts": 8, "num_local_experts": 8, "norm_topk_prob": False}),
]


@pytest.mark.parametrize(("architecture", "change"), ACCEPTED)
def test_fields_that_are_computed_alike_are_accepted(architecture, change):
    values = {
        "architectures": [architecture],
        **SIZES,
        **WRITTEN.get(architecture, {}),
        **change,
    }
    assert list(field_problems(values)) == []
    assert unknown_fields(values) == []


@pytest.mark.parametrize("architecture", SEEING)
def test_positions_with_three_axes_say_where_these_are(architecture: str) -> None:
    values = {"architectures": [architecture], **SIZES, **WRITTEN.get(architecture, {})}
    (problem,) = field_problems(values | {"rope_parameters": {"rope_type": "default"}})
    assert "needs mrope_section" in problem
    rope = LLAMA3 | {"mrope_section": [4, 6, 6]}
    assert "must be one of default" in next(
        field_problems(values | {"rope_parameters": rope})
    )


def test_a_deepseek_says_how_its_router_scores() -> None:
    """vLLM takes softmax if config.json does not say it; transformers 5 does not write it."""
    problems = list(field_problems({"architectures": [DEEPSEEK], **SIZES}))
    assert [line.split()[1] for line in problems] == ["scoring_func", "topk_method"]
    assert all(
        "got none: rollout servers take another value" in line for line in problems
    )


def test_no_field_is_of_two_kinds() -> None:
    assert HONOURED.isdisjoint(HARMLESS)
    assert ONE_VALUE.keys().isdisjoint(HONOURED | HARMLESS)
    for family in FAMILIES.values():
        assert family.values.keys() <= ONE_VALUE.keys() | HONOURED
        assert set(family.read) <= ONE_VALUE.keys()


def test_every_field_with_one_value_is_refused_with_another() -> None:
    for name, allowed in ONE_VALUE.items():
        values = {"architectures": [QWEN3], name: "another"}
        assert "another" not in allowed
        assert name in next(field_problems(values))


def folder_with(tmp_path: Path, **fields: object) -> Path:
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 64}
    table = {"architectures": [LLAMA]} | SIZES | sizes | fields
    (tmp_path / "config.json").write_text(json.dumps(table))
    write_loadable_files(tmp_path)
    return tmp_path


def test_a_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = config_with({"model.path": str(folder_with(tmp_path, mlp_bias=True))})
    with pytest.raises(
        ConfigError, match=r"^model\.path: mlp_bias of a LlamaForCausalLM must be"
    ):
        check_model(config)


def test_ministrals_sequences_stay_where_both_programs_scale_queries_alike(
    tmp_path: Path,
) -> None:
    rope = YARN | {"original_max_position_embeddings": 15, "llama_4_scaling_beta": 0.1}
    model = folder_with(
        tmp_path, architectures=["Ministral3ForCausalLM"], rope_parameters=rope
    )
    with pytest.raises(
        ConfigError, match="original_max_position_embeddings, got 16 and 15"
    ):
        check_model(config_with({"model.path": str(model)}))


TWO_RANKS = {"world_size": 2, "parallel": {"tp": 2}}
THREE_RANKS = {"world_size": 3, "parallel": {"tp": 3}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lora": {"rank": 8, "publish": "adapters"}}, "lora.publish must be merged"),
        (
            {"lora": {"rank": 8}, "learner": TWO_RANKS},
            "learner.parallel.tp must be 1 for adapters",
        ),
        ({"learner": THREE_RANKS}, "q_lora_rank and kv_lora_rank"),
    ],
)
def test_what_latent_attention_lacks_is_refused(tmp_path, section, message):
    sizes = {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 48,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    latent = {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    }
    fields = (
        WRITTEN[DEEPSEEK]
        | sizes
        | experts
        | latent
        | {"first_k_dense_replace": 1, "num_hidden_layers": 2}
    )
    model = folder_with(tmp_path, architectures=[DEEPSEEK], **fields)
    with pytest.raises(ConfigError, match=message):
        check_model(config_with({"model.path": str(model)} | section))


NETS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
# Fields of a small model of a family with parts that not everything can have.
PARTS = {"Qwen3Next": NETS, "Qwen3_5": NETS | {"num_experts": None}, "GptOss": {}}
# With `ranks` of 2 these share the matrices.
LACKS = refusals("""
family = "GptOss", ranks = 2
    etp must be 1 for a GptOss.*: Megatron does not split exp
family = "GptOss", fields.quantization_config.quant_method = "mxfp4"
    cannot be trained: write them anew in bfloat16 as docs/guides/models.md shows
family = "Qwen3Next", learner = {world_size = 4, parallel.cp = 4}
    learner.parallel.tp times cp must divide the 2 heads of delta nets, got 4
family = "Qwen3_5", learner.fp8 = "blockwise", fields.hidden_size = 8
    learner.fp8 = 'blockwise' needs a model.path without delta nets, which was not tried in it
family = "Qwen3_5", ranks = 2, fields.linear_num_key_heads = 1
    must divide the 1 heads of delta nets, got 2
family = "Qwen3Next", ranks = 2, fields.linear_num_key_heads = 1
    must divide the 1 heads of delta nets, got 2
family = "Qwen3Next", lora = {rank = 8, target_modules = ["linear_proj"], publish = "adapters"}
    lora.publish must be "merged" for a Qwen3NextForCausalLM: its files join the inputs of a delta
""")


@pytest.mark.parametrize(("changes", "message"), LACKS)
def test_what_a_family_lacks_is_refused(tmp_path, changes, message):
    architecture = f"{changes['family']}ForCausalLM"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    fields = WRITTEN.get(architecture, {}) | experts | PARTS[changes["family"]]
    fields |= changes.get("fields", {})
    model = folder_with(tmp_path, architectures=[architecture], **fields)
    settings = {"learner": TWO_RANKS} if "ranks" in changes else {}
    settings |= {
        k: v for k, v in changes.items() if k not in ("family", "fields", "ranks")
    }
    with pytest.raises(ConfigError, match=message):
        check_model(config_with({"model.path": str(model)} | settings))


@pytest.mark.parametrize(
    ("fields", "ranks", "rule"),
    [
        (
            {"hidden_size": 24, "head_dim": 16},
            1,
            "multiples of 16, and the hidden size of model.path is 24",
        ),
        (
            {"intermediate_size": 48},
            2,
            "the intermediate size on a rank of model.path is 24",
        ),
        (
            {"num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 2},
            2,
            "queries on a ra",
        ),
        (
            {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 4},
            1,
            "keys on a rank",
        ),
    ],
)
def test_a_matrix_that_fp8_cannot_take_is_refused(
    tmp_path, fields, ranks, rule
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    sizes |= {"num_key_value_heads": 4}
    model = folder_with(
        tmp_path, architectures=["Qwen3ForCausalLM"], **(sizes | fields)
    )
    learner = {"fp8": "blockwise", "world_size": ranks, "parallel": {"tp": ranks}}
    config = config_with(
        {"model.path": str(model), "model.dtype": "bfloat16", "learner": learner}
    )
    with pytest.raises(ConfigError, match=rule):
        check_model(config)
    learner["fp8"] = "off"
    check_model(config_with({"model.path": str(model), "learner": learner}))


@pytest.mark.parametrize(
    "tied", [(True, False), (False, True), (True, None), (None, True)]
)
def test_a_qwen35_that_says_in_two_places_whether_embeddings_are_tied_is_refused(
    tmp_path, tied
):
    outer, inner = (
        {} if is_tied is None else {"tie_word_embeddings": is_tied} for is_tied in tied
    )
    table = {"architectures": [SEEING[3]], "text_config": SIZES | inner, **outer}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(
        ConfigError, match=r"tie_word_embeddings is \w+ in config.json and \w+ in"
    ):
        read_model_table(tmp_path)
    table["text_config"] |= {
        "tie_word_embeddings": outer.get("tie_word_embeddings", False)
    }
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_model_table(tmp_path)["hidden_size"] == SIZES["hidden_size"]


def test_a_reference_that_fp8_cannot_take_is_refused_by_its_own_name(
    tmp_path: Path,
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    sizes |= {"num_key_value_heads": 4, "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "policy").mkdir()
    (tmp_path / "other").mkdir()
    changes = {
        "model.path": str(folder_with(tmp_path / "policy", **sizes)),
        "model.dtype": "bfloat16",
        "learner.fp8": "blockwise",
        "reference.path": str(
            folder_with(tmp_path / "other", **(sizes | {"hidden_size": 24}))
        ),
        "algorithm.kl.coefficient": 0.1,
    }
    with pytest.raises(ConfigError, match=r"the hidden size of reference\.path is 24"):
        check_model(config_with(changes))


def test_a_reference_is_refused_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "other").mkdir()
    changes = {
        "model.path": str(folder_with(tmp_path / "policy")),
        "reference.path": str(folder_with(tmp_path / "other", logit_scale=0.5)),
        "algorithm.kl.coefficient": 0.1,
    }
    with pytest.raises(ConfigError, match=r"^reference\.path: logit_scale of a Llama"):
        check_model(config_with(changes))


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    model = folder_with(
        tmp_path, attention_multiplier=0.5, torch_dtype="float32", auto_map={}
    )
    config = config_with({"model.path": str(model)})
    check_model(config)
    (warning,) = model_warnings(config)
    assert "not known here: attention_multiplier, auto_map;" in warning
