"""Tiny random models as Hugging Face folders, with the tokenizer of tests."""

import shutil
from pathlib import Path

import make_tiny_vision_model
from slipstream.learner.trainer.tiny_model import make_model, make_tokenizer

# The smallest one that vLLM takes settings for.
SMALLEST = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 1,
    "tie_word_embeddings": True,
}


def make_model_folder(folder: Path, **sizes: int) -> Path:
    """A Llama in float32 of the quickstart's sizes, but for `sizes`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    make_model(folder, **sizes)
    return folder


def make_seeing_model(folder: Path, family: str, **sizes: int) -> Path:
    """A model of a family that sees images; returns `folder`."""
    make_tiny_vision_model.make_tokenizer(folder)
    make_tiny_vision_model.make_model(folder, family, **sizes)
    return folder


def make_mixture_like(model: Path, folder: Path) -> Path:
    """The same model with four experts, whose size the engine's kernel takes."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(model, folder)
    fields = AutoConfig.from_pretrained(model).to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        fields.pop(name)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**fields | experts, norm_topk_prob=True)
    )
    mixture.save_pretrained(folder)
    return folder
