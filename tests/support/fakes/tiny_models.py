"""Tiny random models as Hugging Face folders, with the tokenizer of tests."""

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
