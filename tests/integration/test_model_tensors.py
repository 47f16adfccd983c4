"""Files that transformers writes pass the check of tensors, for every family."""

import shutil
from pathlib import Path

import pytest
from make_tiny_vision_model import FAMILIES, make_model
from slipstream.core.models import families
from slipstream.core.models.model_fields import has_tied_output
from slipstream.core.models.model_files import read_header, tensor_problems
from slipstream.core.models.model_sizes import ModelSizes, read_model_table
from support.fakes.model_folders import write_safetensors
from support.fakes.parity_models import make_models

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    make_models(folder)
    for family in FAMILIES:
        make_model(folder / family, family)
    return sorted(folder.iterdir())


def test_the_files_of_every_family_pass_and_a_part_that_is_missing_is_named(
    folders, tmp_path
):
    seen = set()
    for folder in folders:
        values = read_model_table(folder)
        sees = ModelSizes.of(values).has_vision
        assert not list(tensor_problems(folder, "model.path", has_tower=sees)), (
            folder.name
        )
        seen |= set(values["architectures"])
        copied = tmp_path / folder.name
        shutil.copytree(folder, copied)
        (file,) = copied.glob("*.safetensors")
        shapes = {name: facts["shape"] for name, facts in read_header(file).items()}
        blocks = [
            name
            for name in shapes
            if ".layers.1." in name and "vision_tower" not in name
        ]
        write_safetensors(
            file, beside={k: v for k, v in shapes.items() if k not in blocks}
        )
        assert any(
            "has no layer 1" in tensor_problem
            for tensor_problem in tensor_problems(copied, "model.path")
        )
    assert seen == set(families.FAMILIES)


def test_a_config_that_does_not_say_whether_embeddings_are_tied_means_the_default() -> (
    None
):
    import transformers
    from slipstream.core.models.registered_kinds import MiMoConfig

    # transformers has no class of that name.
    settings = {"MiMoForCausalLM": MiMoConfig}
    for name, family in families.FAMILIES.items():
        if family.decoder_folder:
            # Its config.json must say so.
            continue
        kind = settings.get(name) or getattr(transformers, name).config_class
        default = kind().tie_word_embeddings
        assert has_tied_output({"architectures": [name]}) == default, name
