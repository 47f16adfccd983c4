"""Folders of models that cannot be loaded are found before anything is loaded."""

import json
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_files import missing_files, missing_weights
from slipstream.core.models.model_sizes import read_model_sizes
from support.fakes.model_folders import write_loadable_files, write_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_loadable_files(tmp_path)
    return tmp_path


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def test_a_folder_without_weights_is_found(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert missing_files(folder) == [
        f"model.path must hold safetensors weights, but {folder} has none"
    ]


def test_weights_that_the_hub_still_has_are_no_fault_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--tiny" / "snapshots" / "c0ffee"
    (said,) = missing_weights(folder, "model.path")
    assert said == (
        f"model.path has no weights in the hub's cache yet, {folder}: a dry run brings none"
    )


def test_weights_that_were_cut_off_are_found(folder: Path) -> None:
    path = folder / "model.safetensors"
    write_safetensors(path, 1000)
    size = path.stat().st_size
    assert missing_files(folder) == []
    cut(path, size - 1)
    rule = "model.path must hold whole files"
    assert missing_files(folder) == [f"{rule}: {path} has {size - 1:,} of {size:,} bytes"]


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 30])
def test_weights_that_end_within_their_header_are_found(num_bytes: int, folder: Path) -> None:
    cut(folder / "model.safetensors", num_bytes)
    assert len(missing_files(folder)) == 1


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\n", "<html></html>"])
def test_a_page_or_a_pointer_in_place_of_weights_is_found(text: str, folder: Path) -> None:
    (folder / "model.safetensors").write_text(text)
    (problem,) = missing_files(folder)
    assert problem.endswith(f"{len(text)} bytes, does not begin as a safetensors file does")


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_found(folder: Path) -> None:
    write_safetensors(folder / "model-1.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (problem,) = missing_files(folder)
    shard = folder / "model-2.safetensors"
    assert problem.endswith(f"{shard} is missing, which {index.name} names")
    write_safetensors(shard)
    # What the index does not name is not loaded.
    cut(folder / "model.safetensors", 3)
    assert missing_files(folder) == []
    index.write_text("[]")
    (problem,) = missing_files(folder)
    assert f"{index} is no index of safetensors" in problem


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, folder: Path) -> None:
    # Root reads everything but a file that is none.
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/mem")
    (wrong,) = missing_files(folder)
    assert wrong.startswith(f"model.path must hold whole files: {folder / name} cannot be read: ")


def test_a_tokenizer_without_a_vocabulary_is_found(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (problem,) = missing_files(folder)
    assert problem.startswith(f"model.path must hold the tokenizer too, but {folder} has none of")
    (folder / "tokenizer_config.json").unlink()
    (problem,) = missing_files(folder)
    assert problem.endswith("has no tokenizer_config.json")


def test_a_tokenizer_without_a_chat_template_is_found(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (problem,) = missing_files(folder)
    assert problem.startswith("model.path must hold a tokenizer with a chat template")
    assert problem.endswith("name a file with one in rollout_server.chat_template")
    assert missing_files(folder, folder / "mine.jinja") == []
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert missing_files(folder) == []


def test_a_relative_path_that_is_not_there_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"got models/tiny, which does not exist below {tmp_path}$"
    ):
        read_model_sizes(Path("models/tiny"))


def test_a_folder_with_mistrals_own_form_too_is_refused(folder: Path) -> None:
    write_safetensors(folder / "consolidated.safetensors")
    (problem,) = missing_files(folder)
    assert "remove consolidated*.safetensors and params.json from" in problem
    # Rollout servers read no other folder.
    assert missing_weights(folder, "critic.path") == []
