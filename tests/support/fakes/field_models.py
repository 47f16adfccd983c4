"""Tiny models of every supported class whose config.json has no value that is anyone's default."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 40}


@dataclass(frozen=True)
class Family:
    """What a class adds to `SIZES`, and what its config.json can say otherwise of one computation.

    Each of `choices` is the other value of a field: with the same weights it makes another model.
    """

    config: str
    model: str
    values: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        MIXTURE | {"head_dim": 32, "norm_topk_prob": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        MIXTURE | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 32},
        {"num_experts_per_tok": 2},
    ),
}
CHOICES = {"rms_norm_eps": 1e-6}
# Each family twice: with scaled positions and a projection of its own, and without both.
ROPES = {"llama3": LLAMA3_ROPE, "default": DEFAULT_ROPE}
CASES = [f"{family}.{rope}" for family in FAMILIES for rope in ROPES]


def make_field_model(folder: Path, case: str) -> None:
    """A Hugging Face folder `folder`/`case`, in the form that transformers writes."""
    import transformers

    family, rope = case.split(".")
    known = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, known.config)(
        **SIZES | known.values,
        rope_parameters=dict(ROPES[rope]),
        tie_word_embeddings=rope == "default",
    )
    model = getattr(transformers, known.model)(config)
    # Larger weights than a fresh model's, so that attention and norms matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / case)


def write_as_transformers_4(folder: Path) -> None:
    """Changes the config.json of `folder` to the form of older versions."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    path.write_text(json.dumps(values))
