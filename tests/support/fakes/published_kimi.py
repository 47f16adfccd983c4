"""A tiny Kimi K2.5 in the form in which it is published."""

import copy
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

ARCHITECTURE = "KimiK25ForConditionalGeneration"
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def random_kimi(values: dict[str, Any]) -> Any:
    """A model of transformers whose decoder has `values`, with its next random weights."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **copy.deepcopy(values)},
        vision_config=TOWER,
        projection_hidden_size=TOWER["hidden_size"],
        tie_word_embeddings=False,
    )
    return Kimi_K25ForConditionalGeneration(config)


def published_name(name: str) -> str:
    """The name in published files of a tensor of the decoder of transformers' model."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.replace("model.language_model.", "language_model.model.", 1)


def write_as_published(folder: Path) -> None:
    """Gives a folder of transformers 5.19, which saves other names, the published names."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["architectures"] = [ARCHITECTURE]
    values["text_config"] |= {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
    }
    path.write_text(json.dumps(values))
    weights = folder / "model.safetensors"
    tensors = {
        name.replace("model.blocks.", "model.layers.").removeprefix("model."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, {"format": "pt"})
