"""The tensors that a folder must hold are those that transformers writes, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_vision_model import FAMILIES, make_model
from slipstream.protocol.settings.model_fields import has_tied_output
from slipstream.protocol.settings.model_files import read_header
from slipstream.protocol.settings.model_rules import ARCHITECTURES
from slipstream.protocol.settings.model_sizes import ModelSizes, read_model_table
from slipstream.protocol.settings.model_tensors import needed_tensors, tensor_problems
from slipstream.protocol.settings.nested_decoders import TOWERS, is_nested, nested_name
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
            # The tower's shapes are not checked.
            if not name.startswith(("visual.", "model.visual.", *TOWERS))
        }
        needed = needed_tensors(values)
        if is_nested(values):
            needed = {nested_name(name, held): shape for name, shape in needed.items()}
        assert needed == held, folder.name
        assert not list(tensor_problems(folder, "model.path", has_tower=sees))
        seen |= set(values["architectures"])
    assert seen == set(ARCHITECTURES)


def test_a_config_that_does_not_say_whether_embeddings_are_tied_means_the_default() -> None:
    import transformers

    for name in ARCHITECTURES:
        default = getattr(transformers, name).config_class().tie_word_embeddings
        assert has_tied_output({"architectures": [name]}) == default, name
