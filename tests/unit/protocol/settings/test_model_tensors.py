"""Tensors that are missing, or have another shape, are found in the headers of the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config_file import check_model
from slipstream.protocol.settings.model_files import INDEX, read_header
from slipstream.protocol.settings.model_tensors import needed_tensors, tensor_problems
from support.fakes.model_folders import write_loadable_files, write_safetensors
from support.fakes.small_configs import config_of

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    write_loadable_files(tmp_path)
    return tmp_path


def problems(folder: Path) -> list[str]:
    return list(tensor_problems(folder, "model.path"))


def shapes() -> dict[str, tuple[int, ...]]:
    return needed_tensors(SIZES)


def test_a_model_without_a_tensor_is_refused_before_it_is_loaded(folder: Path) -> None:
    config = config_of(folder)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    check_model(config)
    path = folder / "model.safetensors"
    write_safetensors(path, beside={k: v for k, v in shapes().items() if k != NORM})
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == (
        f"model.path must hold every tensor of a LlamaForCausalLM: {path} has no {NORM} "
        "of shape [8]"
    )


def test_a_tensor_of_another_shape_is_named_with_its_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    write_safetensors(path, beside=shapes() | {"model.embed_tokens.weight": (96, 8)})
    assert problems(folder) == [
        f"model.path must hold tensors that fit its config.json: {path} has "
        "model.embed_tokens.weight of shape [96, 8], not [100, 8]"
    ]


def test_of_shards_those_count_to_which_the_index_leads(folder: Path) -> None:
    whole = folder / "model.safetensors"
    shard = folder / "model-1.safetensors"
    shutil.copy(whole, shard)
    index = folder / INDEX
    files = dict.fromkeys(shapes(), shard.name)
    index.write_text(json.dumps({"weight_map": files}))
    assert problems(folder) == []
    index.write_text(json.dumps({"weight_map": {k: v for k, v in files.items() if k != NORM}}))
    (problem,) = problems(folder)
    assert f"{index} has no {NORM}" in problem
    index.write_text(json.dumps({"weight_map": files}))
    write_safetensors(shard, beside={k: v for k, v in shapes().items() if k != NORM})
    (problem,) = problems(folder)
    assert f"has no {NORM}" in problem


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_layer_is_needed_where_it_is_not_tied(is_tied: bool, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | {"tie_word_embeddings": is_tied}))
    without = {k: v for k, v in shapes().items() if k != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", beside=without)
    assert len(problems(folder)) == (not is_tied)
    # A critic needs no output layer: it has a head of its own.
    assert not list(tensor_problems(folder, "critic.path", has_output=False))


def test_tensors_beside_those_that_are_needed_do_not_matter(folder: Path) -> None:
    assert "w" in read_header(folder / "model.safetensors")
    assert problems(folder) == []
