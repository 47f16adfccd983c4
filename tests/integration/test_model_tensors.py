"""The tensors that a folder must hold are those that transformers writes, for every family."""

from pathlib import Path

import pytest
from make_tiny_vision_model import FAMILIES, make_model
from slipstream.core.models import registry
from slipstream.core.models.model_fields import has_tied_output
from slipstream.core.models.model_files import read_header
from slipstream.core.models.model_sizes import ModelSizes, decoder_table, read_model_table
from slipstream.core.models.model_tensors import (
    TOWER_FOLDERS,
    needed_tensors,
    tensor_problems,
    tower_tensors,
)
from slipstream.core.models.nested_decoders import is_nested, nested_name
from support.fakes.parity_models import make_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    make_models(folder)
    for family in FAMILIES:
        make_model(folder / family, family)
    return sorted(folder.iterdir())


def test_the_tensors_of_every_family_are_needed_as_transformers_writes_them(
    folders: list[Path],
) -> None:
    seen = set()
    for folder in folders:
        values = read_model_table(folder)
        sees = ModelSizes.of(values).has_vision
        (file,) = folder.glob("*.safetensors")
        held = {
            name: tuple(each["shape"])
            for name, each in read_header(file).items()
            # A tower that is left out is not checked.
            if sees or not name.startswith(TOWER_FOLDERS)
        }
        needed = needed_tensors(values)
        if is_nested(values):
            needed = {nested_name(name, held): shape for name, shape in needed.items()}
        if sees:
            needed |= tower_tensors(values, held)
        assert needed == held, folder.name
        assert not list(tensor_problems(folder, "model.path", has_tower=sees))
        seen |= set(values["architectures"])
    assert seen == set(registry.FAMILIES)


def test_a_config_that_does_not_say_whether_embeddings_are_tied_means_the_default() -> None:
    import transformers

    for name in registry.FAMILIES:
        default = getattr(transformers, name).config_class().tie_word_embeddings
        assert has_tied_output({"architectures": [name]}) == default, name


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_a_tower_that_are_left_out_are_the_defaults(family: str) -> None:
    import torch
    import transformers

    kind = f"{FAMILIES[family]}ForConditionalGeneration"
    outer = getattr(transformers, kind).config_class
    tower = outer.sub_configs["vision_config"] if family != "mistral3" else None
    settings = (tower or transformers.PixtralVisionConfig)()
    with torch.device("meta"):
        made = transformers.AutoModel.from_config(settings).state_dict()
    # A table with one field, as an empty one counts as none.
    values = {"architectures": [kind], "vision_config": {"hidden_act": "silu"}}
    values["text_config"] = {"hidden_size": 3584}
    inner = "vision_tower." if family == "mistral3" else "visual."
    found = {
        name.partition(inner)[2]: shape
        for name, shape in tower_tensors(decoder_table(values), ()).items()
        if inner in name
    }
    assert found == {name: tuple(tensor.shape) for name, tensor in made.items()}
    deep = getattr(settings, "deepstack_visual_indexes", ())
    assert ModelSizes.of(decoder_table(values)).deep_layers == len(deep)
