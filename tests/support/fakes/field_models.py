"""Tiny models of every supported class whose config.json has no value that is anyone's default."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from slipstream.learner.trainer.tiny_model import make_tokenizer

from support.fakes.parity_models import (
    OTHER_KINDS,
    enlarge,
    random_model,
    write_as_other_kind,
)
from support.fakes.published_kimi import write_as_published

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    # Large enough that rounding does not hide its effect, small enough that it has one.
    "rms_norm_eps": 0.02,
    "dtype": "float32",
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 300.0}
# The base is high enough that the frequencies of such short heads are scaled, too.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 700000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Bounds that are nobody's defaults.
OTHER_LLAMA3_ROPE = LLAMA3_ROPE | {
    "low_freq_factor": 2.0,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 256,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 300.0, "factor": 8.0}
# Sequences are longer than the original length.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 128,
}
OTHER_YARN_ROPE = YARN_ROPE | {
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
FACTOR_YARN_ROPE = YARN_ROPE | {"attention_factor": 1.5}
MINISTRAL_ROPE = YARN_ROPE | {
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GPT_OSS_ROPE = YARN_ROPE | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
GLM_ROPE = DEFAULT_ROPE | {"partial_rotary_factor": 0.5}
LATENT_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7}
# No two choices of experts are so close that rounding changes them.
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "num_mtp_layers": 0,
}
# vLLM's kernels for a CPU take these sizes of heads and latent vectors only.
LATENT = SIGMOID | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
SIGMOID_CHOICES = {"routed_scaling_factor": 1.0, "num_experts_per_tok": 3}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
# vLLM's kernels for a CPU take these sizes of heads only.
DELTA_NETS = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
WINDOWS = {
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA = WINDOWS | {"head_dim": 32, "query_pre_attn_scalar": 50}
GEMMA_CHOICES = {
    "sliding_window": 101,
    "layer_types": ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 32,
}
# Positions of layers with and without windows.
GEMMA3_ROPE = {
    "sliding_attention": DEFAULT_ROPE,
    "full_attention": LINEAR_ROPE | {"rope_theta": 5000.0},
}


@dataclass(frozen=True)
class Family:
    """What a class adds to `SIZES`, and what its config.json can say otherwise of one computation.

    Each of `choices` is the other value of a field: with the same weights it makes another model.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("Llama", {"head_dim": 32}),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"head_dim": 32}),
    "qwen3-moe": Family(
        "Qwen3Moe",
        MIXTURE | {"head_dim": 32, "norm_topk_prob": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "olmo2": Family("Olmo2"),
    "gemma3": Family("Gemma3Text", GEMMA, GEMMA_CHOICES),
    "glm": Family(
        "Glm4Moe",
        SIGMOID | {"head_dim": 32, "attention_bias": True, "use_qk_norm": True},
        SIGMOID_CHOICES,
    ),
    "deepseek": Family(
        "DeepseekV3",
        LATENT
        | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 2,
            "topk_group": 1,
        },
        SIGMOID_CHOICES | {"rms_norm_eps": 0.02, "topk_group": 2},
    ),
    "qwen3-next": Family(
        "Qwen3Next",
        MIXTURE
        | DELTA_NETS
        | {"norm_topk_prob": True, "shared_expert_intermediate_size": 24},
        {"norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "qwen35": Family("Qwen3_5Text", DELTA_NETS),
    "qwen35-moe": Family(
        "Qwen3_5MoeText",
        MIXTURE | DELTA_NETS | {"shared_expert_intermediate_size": 24},
        {"num_experts_per_tok": 2},
    ),
    # vLLM reads none of the last three fields of the choices: other values are refused.
    "gpt-oss": Family(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": 100,
            "rms_norm_eps": 1e-5,
        },
        {
            "num_experts_per_tok": 2,
            "sliding_window": 101,
            "rms_norm_eps": 0.02,
            "swiglu_limit": 6.0,
            "swiglu_alpha": 1.0,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "glm-lite": Family(
        "Glm4MoeLite", LATENT, SIGMOID_CHOICES | {"n_group": 2, "rms_norm_eps": 0.02}
    ),
    "kimi": Family(
        "DeepseekV3",
        LATENT
        | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
        },
        SIGMOID_CHOICES | {"rms_norm_eps": 0.02},
    ),
    "kimi25": Family(
        "Kimi_K25",
        LATENT
        | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
        },
        SIGMOID_CHOICES | {"rms_norm_eps": 0.02},
    ),
    "mimo": Family("Qwen2"),
    "minimax": Family(
        "MiniMaxM2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rotary_dim": 16,
        }
        | {"scoring_func": "sigmoid", "use_routing_bias": True},
        {"num_experts_per_tok": 2},
    ),
    "smollm3": Family(
        "SmolLM3",
        {"no_rope_layers": [1, 0], "pad_token_id": None},
        {"no_rope_layers": [0, 1]},
    ),
    "mistral": Family(
        "Mistral", {"head_dim": 32, "sliding_window": 100}, {"sliding_window": 101}
    ),
    "ministral3": Family("Ministral3", {"head_dim": 32}),
}
CHOICES = {"rms_norm_eps": 1e-6}
# Every family twice: with scaled positions and a projection of its own, and without both.
ROPES = {
    "llama3": LLAMA3_ROPE,
    "default": DEFAULT_ROPE,
    "untied": DEFAULT_ROPE,
    "llama3-other": OTHER_LLAMA3_ROPE,
    "linear": LINEAR_ROPE,
    "yarn": YARN_ROPE,
    "yarn-other": OTHER_YARN_ROPE,
    "yarn-factor": FACTOR_YARN_ROPE,
    "ministral": MINISTRAL_ROPE,
    "gemma3": GEMMA3_ROPE,
    "glm": GLM_ROPE,
    "latent": LATENT_ROPE,
    "gpt-oss": GPT_OSS_ROPE,
}
_TWICE = ("llama", "qwen2", "qwen3", "qwen3-moe", "olmo2")
# Each family twice: with scaled positions and a projection of its own, and without both. One family
# with each further kind of positions.
CASES = [
    *(f"{family}.{rope}" for family in _TWICE for rope in ("llama3", "default")),
    *(f"llama.{rope}" for rope in ("llama3-other", "linear", "yarn", "yarn-other")),
    "qwen3.yarn-factor",
    "mistral.default",
    "mistral.linear",
    "ministral3.ministral",
    "gemma3.gemma3",
    "glm.glm",
    "deepseek.latent",
    "gpt-oss.gpt-oss",
    "kimi.latent",
    "kimi25.latent",
    "mimo.default",
    "glm-lite.untied",
    "minimax.glm",
    "smollm3.default",
    "smollm3.untied",
    "qwen3-next.glm",
    "qwen35.glm",
    "qwen35-moe.glm",
]


def make_field_model(
    folder: Path, case: str, *, seed: int = 0, **sizes: object
) -> None:
    """A Hugging Face folder `folder`/`case`, in the form that transformers writes."""
    family, rope = case.split(".")
    record = FAMILIES[family]
    torch.manual_seed(seed)
    is_tied = rope in ("default", "gemma3")
    positions = {"rope_parameters": ROPES[rope], "tie_word_embeddings": is_tied}
    model = random_model(record.kind, SIZES | record.values | sizes | positions)
    enlarge(model, family)
    model.save_pretrained(folder / case)
    if family == "kimi25":
        write_as_published(folder / case)
    if family in OTHER_KINDS:
        write_as_other_kind(folder / case, family)


def add_tokenizer(folder: Path) -> None:
    """Writes a tokenizer into `folder`, whose config.json stays as it is."""
    config = (folder / "config.json").read_text()
    make_tokenizer(folder)
    (folder / "config.json").write_text(config)


def make_delta_net_model(folder: Path, **sizes: object) -> Path:
    """Returns a folder of Qwen3.5 with a tokenizer, which vLLM computes on a CPU in bfloat16."""
    # vLLM's convolution for a CPU takes the published width alone.
    make_field_model(folder, "qwen35.glm", linear_conv_kernel_dim=4, **sizes)
    add_tokenizer(folder / "qwen35.glm")
    return folder / "qwen35.glm"


def write_as_transformers_4(folder: Path) -> None:
    """Changes the config.json of `folder` to the form of older versions."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    path.write_text(json.dumps(values))
