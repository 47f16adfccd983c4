"""A tiny Qwen3.5 in the form of its published folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MTP = "mtp.fc.weight"


def write_as_published(folder: Path) -> None:
    """Adds fields of config.json that transformers 5 does not write, and a layer of MTP's."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    family = values["model_type"]
    values["text_config"] |= {
        "attn_output_gate": True,
        "full_attention_interval": 2,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    # The part of a head that is turned stands in its table alone.
    values["text_config"].pop("partial_rotary_factor", None)
    values["vision_config"] |= {"deepstack_visual_indexes": [], "model_type": family}
    path.write_text(json.dumps(values))
    file = folder / "model.safetensors"
    hidden = values["text_config"]["hidden_size"]
    tensors = load_file(file) | {MTP: torch.randn(hidden, 2 * hidden)}
    save_file(tensors, file, metadata={"format": "pt"})
