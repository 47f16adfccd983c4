"""Tiny models of every family that is trained, as Hugging Face folders."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from support.fakes.published_kimi import random_kimi, write_as_published

VOCAB = 64
NUM_LAYERS = 4
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2
# Fields that config.json of a DeepSeek V3 and of a Qwen2 says if it is another model.
OTHER_KINDS = {
    "kimi": {"model_type": "kimi_k2"},
    "mimo": {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]},
}


def random_model(kind: str, values: dict[str, Any]) -> Any:
    """A model of the class of transformers that `kind` begins, with its next random weights."""
    import transformers

    if kind == "Kimi_K25":
        return random_kimi(values)

    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(values))
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def make_models(folder: Path, *, num_layers: int = NUM_LAYERS) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
        # transformers does not train the embedding of a token for padding.
        "pad_token_id": None,
    }
    rope = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    # Llama 3.1's scaling, with a base high enough that it also scales the frequencies of such
    # short heads.
    scaled = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    long = sizes | {"max_position_embeddings": 16384, "rope_parameters": scaled}
    # Sequences of tests are within the original length, as rollout servers need it.
    yarn = {
        "rope_theta": 1000.0,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    mixture = {
        **sizes,
        **rope,
        "tie_word_embeddings": False,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 48,
    }
    shared_expert = {"shared_expert_intermediate_size": 32}
    # Both kinds of layers, and no number that is a default.
    gemma = {
        **sizes,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 20,
    }
    gemma["layer_types"] = gemma["layer_types"][:num_layers]
    gemma3 = gemma | {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 700.0, "rope_type": "default"},
            "full_attention": {"rope_theta": 5e3, "rope_type": "linear", "factor": 4.0},
        }
    }
    sigmoid = {
        **sizes,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "num_mtp_layers": 0,
    }
    glm_rope = {
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": 0.5}
    }
    latent = {
        **sigmoid,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "rms_norm_eps": 1e-6,
    }
    del latent["head_dim"]
    delta_net = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    delta_net["layer_types"] = delta_net["layer_types"][:num_layers]
    # Sequences are longer than the original length.
    latent_yarn = yarn | {"factor": 8.0, "original_max_position_embeddings": 16}
    latent_yarn |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    del latent_yarn["llama_4_scaling_beta"]
    # Frequencies in between, which a rounded range would put elsewhere.
    gpt_oss_yarn = {
        "rope_theta": 1000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 3.0,
        "beta_slow": 0.4,
        "truncate": False,
        "original_max_position_embeddings": 32,
    }
    one_group = latent | {"n_group": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    # Class of transformers -> what its config.json says.
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {**sizes, "tie_word_embeddings": False}),
        "tied": ("Llama", {**sizes, "tie_word_embeddings": True}),
        # A vocabulary that two ranks do not divide.
        "odd": (
            "Llama",
            sizes | {"vocab_size": VOCAB + 1, "tie_word_embeddings": True},
        ),
        "llama3": ("Llama", long | {"tie_word_embeddings": True}),
        # Queries, keys and values have biases.
        "qwen2": ("Qwen2", {**sizes, **rope, "tie_word_embeddings": True}),
        # Heads are wider than their share of the hidden size.
        "qwen3": (
            "Qwen3",
            sizes | rope | {"head_dim": 32, "tie_word_embeddings": False},
        ),
        "moe": ("Qwen3Moe", mixture | {"norm_topk_prob": True}),
        "moe-softmax": ("Qwen3Moe", mixture | {"norm_topk_prob": False}),
        "qwen3-next": (
            "Qwen3Next",
            mixture | delta_net | glm_rope | shared_expert | {"norm_topk_prob": True},
        ),
        "qwen35": (
            "Qwen3_5Text",
            sizes | delta_net | glm_rope | {"tie_word_embeddings": True},
        ),
        "qwen35-moe": (
            "Qwen3_5MoeText",
            {
                name: value
                for name, value in mixture.items()
                if name != "intermediate_size"
            }
            | delta_net
            | glm_rope
            | shared_expert,
        ),
        # The window is shorter than most sequences.
        "mistral": ("Mistral", {**sizes, **rope, "sliding_window": 6}),
        "ministral3": ("Ministral3", {**sizes, "rope_parameters": yarn}),
        "gemma3": ("Gemma3Text", gemma3),
        "glm": (
            "Glm4Moe",
            sigmoid | glm_rope | {"attention_bias": True, "use_qk_norm": True},
        ),
        "deepseek": ("DeepseekV3", latent | {"rope_parameters": latent_yarn}),
        # Queries come from no latent vector, and two ranks do not divide the vocabulary.
        "moonlight": (
            "DeepseekV3",
            one_group
            | rope
            | {"q_lora_rank": None, "n_shared_experts": 1, "vocab_size": VOCAB + 1},
        ),
        "gpt-oss": (
            "GptOss",
            sizes | experts | {"rope_parameters": gpt_oss_yarn, "sliding_window": 6},
        ),
        "olmo2": ("Olmo2", {**sizes, **rope}),
        "kimi": ("DeepseekV3", one_group | {"rope_parameters": latent_yarn}),
        "kimi25": ("Kimi_K25", one_group | {"rope_parameters": latent_yarn}),
        "mimo": ("Qwen2", {**sizes, **rope}),
        "glm-lite": ("Glm4MoeLite", one_group | rope),
        "minimax": (
            "MiniMaxM2",
            sizes
            | glm_rope
            | experts
            | {"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
        ),
        "smollm3": ("SmolLM3", sizes | rope | {"no_rope_layers": [1, 0] * num_layers}),
    }
    for name, (kind, values) in models.items():
        # No other model changes what this one gets.
        torch.manual_seed(0)
        model = random_model(kind, values)
        torch.manual_seed(2)
        enlarge(model, name)
        model.save_pretrained(folder / name)
    write_as_published(folder / "kimi25")
    for name in OTHER_KINDS:
        write_as_other_kind(folder / name, name)


def enlarge(model: torch.nn.Module, family: str) -> None:
    """Makes weights larger than a fresh model's, so that attention and norms matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj") and family == "gpt-oss":
                # Some are beyond the limit of the experts' activation.
                parameter.mul_(20.0)
            elif parameter.dim() > 1 and not name.endswith("_bias"):
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        # Biases that change which experts are chosen, and leave the choice to the scores.
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))


def write_as_other_kind(folder: Path, family: str) -> None:
    """Writes into config.json that it is of a kind which transformers does not know."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OTHER_KINDS[family]))


def make_mixture(folder: Path, *, seed: int, **sizes: int) -> None:
    """A mixture of experts of sizes that vLLM's kernels take, with the tokenizer of tests."""
    # A script of this folder may not have `deploy` on its path.
    sys.path.append(str(Path(__file__).parents[3] / "deploy"))
    from slipstream.learner.trainer.tiny_model import make_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_tokenizer(folder)
    torch.manual_seed(seed)
    ordinary = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 64,
    }
    config = Qwen3MoeConfig(
        **ordinary | sizes,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    model.save_pretrained(folder)
