"""The tensors that a folder must hold are those that transformers writes, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slipstream.protocol.settings.model_fields import has_tied_output
from slipstream.protocol.settings.model_files import read_header
from slipstream.protocol.settings.model_tensors import needed_tensors, tensor_problems
from slipstream.protocol.settings.parallel_rules import ARCHITECTURES
from support.fakes.parity_models import make_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    make_models(folder)
    return sorted(folder.iterdir())


def test_the_tensors_of_every_family_are_needed_as_transformers_writes_them(
    folders: list[Path],
) -> None:
    seen = set()
    for folder in folders:
        values = json.loads((folder / "config.json").read_text())
        (file,) = folder.glob("*.safetensors")
        held = {name: tuple(each["shape"]) for name, each in read_header(file).items()}
        assert needed_tensors(values) == held, folder.name
        assert not list(tensor_problems(folder, "model.path"))
        seen |= set(values["architectures"])
    assert seen == set(ARCHITECTURES)


def test_a_config_that_does_not_say_whether_embeddings_are_tied_means_the_default() -> None:
    import transformers

    for name in ARCHITECTURES:
        default = getattr(transformers, name).config_class().tie_word_embeddings
        assert has_tied_output({"architectures": [name]}) == default, name
