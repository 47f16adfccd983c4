from pathlib import Path

from safetensors.torch import load_file
from slipstream.learner.trainer.tiny_model import make_model
from support.fakes.tiny_models import make_seeing_model


def test_every_token_of_the_tiny_model_has_an_embedding(tmp_path: Path) -> None:
    """A row of zeros would have the largest gradient by far, behind a norm."""
    make_model(tmp_path)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert embeddings.norm(dim=1).min() > 0.1


def test_every_token_of_a_tiny_model_with_vision_has_an_embedding(
    tmp_path: Path,
) -> None:
    folder = make_seeing_model(tmp_path, "qwen3_vl")
    (embeddings,) = (
        tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("embed_tokens.weight")
    )
    assert embeddings.norm(dim=1).min() > 0.1
