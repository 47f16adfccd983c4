"""A text model's folder as the decoder of one with a vision tower, as such are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
# What stands beside text_config; tie_word_embeddings is left out.
_OUTER = {
    "Gemma3ForCausalLM": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 6,
        "eoi_token_index": 7,
        "image_token_index": 5,
        "mm_tokens_per_image": 4,
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
    },
    **dict.fromkeys(
        ("MistralForCausalLM", "Ministral3ForCausalLM"),
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 5,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_config": {**_TOWER, "model_type": "pixtral", "hidden_act": "silu"},
        },
    ),
}


def nest(folder: Path) -> None:
    """Changes the folder of a text model to that of its class with a tower, with random weights."""
    import transformers

    path, weights = folder / "config.json", folder / "model.safetensors"
    decoder = json.loads(path.read_text())
    (name,) = decoder.pop("architectures")
    path.write_text(json.dumps(_OUTER[name] | {"text_config": decoder, "dtype": "float32"}))
    outer = _OUTER[name]["architectures"][0]
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    whole = getattr(transformers, outer)(config).state_dict()
    tower = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in whole.items()
        if "vision_tower." in name or "multi_modal_projector." in name
    }
    decoders = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(decoders | tower, weights, {"format": "pt"})
