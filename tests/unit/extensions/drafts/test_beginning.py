"""Where the layer that drafts begins: in the folder of the model, or with random values."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.extensions.drafts.layer import DraftLayer
from slipstream.extensions.drafts.shape import FOLDER, begun
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings of a run with the layer, from a model whose folder has none yet."""
    return config_of_engine(make_model_folder(tmp_path / "model"), drafts={})


@pytest.fixture
def weights(config: Config) -> Path:
    """The file of a layer with values of its own, now in the model's folder."""
    shape, folder = begun(config)
    assert folder is None
    own = config.model.path / FOLDER
    shape.write_folder(own, "bfloat16")
    random = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(size, generator=random) for name, size in shape.tensors()
    }
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        own / "model.safetensors",
    )
    return own / "model.safetensors"


def test_the_layer_begins_as_in_the_models_folder(
    config: Config, weights: Path
) -> None:
    layer = DraftLayer.beside(config, CPU, load_weights=True)
    for name, value in load_file(weights).items():
        assert torch.equal(layer.named()[name], value.float()), name


def test_random_weights_are_a_random_layer(config: Config, weights: Path) -> None:
    layer = DraftLayer.beside(config, CPU, load_weights=False)
    weights.unlink()
    again = DraftLayer.beside(config, CPU, load_weights=True)
    assert torch.equal(layer.values, again.values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_theta", 123.0), ("num_attention_heads", 1), ("num_hidden_layers", 2)],
)
def test_a_layer_of_other_sizes_is_refused(
    config: Config, weights: Path, name: str, value: float
) -> None:
    path = weights.with_name("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(
        ConfigError, match=rf"beside this model, whose {name} is .* has {value}"
    ):
        begun(config)


def test_tensors_of_another_layer_are_refused(config: Config, weights: Path) -> None:
    tensors = load_file(weights)
    for name in tensors:
        save_file(
            {key: value for key, value in tensors.items() if key != name}, weights
        )
        with pytest.raises(ConfigError, match=f"whose {name} is .* has None"):
            begun(config)
        save_file(tensors | {name: tensors[name][:-1].contiguous()}, weights)
        with pytest.raises(ConfigError, match=f"whose {name} is "):
            begun(config)
    save_file(tensors | {"fc.bias": torch.zeros(2)}, weights)
    with pytest.raises(ConfigError, match=r"whose fc\.bias is None: .* has \(2,\)"):
        begun(config)


def test_a_file_that_is_cut_off_is_refused(config: Config, weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(
        ConfigError, match=r"folder draft must hold whole files: .* bytes"
    ):
        begun(config)
