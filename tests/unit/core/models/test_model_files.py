"""Folders of models that cannot be loaded are found before anything is loaded.

Tensors that are missing, or have another shape, are found in the headers of the files.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from make_tiny_vision_model import FAMILIES, make_model, make_tokenizer
from slipstream.core.configuration.config_file import check_model
from slipstream.core.errors import ConfigError
from slipstream.core.models import model_files
from slipstream.core.models.model_files import (
    INDEX,
    is_untrained,
    loaded_tensors,
    missing_files,
    missing_weights,
    read_header,
    tensor_problems,
)
from slipstream.core.models.model_rules import vocabulary_problems
from slipstream.core.models.model_sizes import decoder_table, read_model_sizes
from support.fakes.model_folders import (
    loadable_tensors,
    write_loadable_files,
    write_safetensors,
)
from support.fakes.small_configs import config_with

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
    return loadable_tensors(SIZES)


def test_a_model_without_a_tensor_is_refused_before_it_is_loaded(folder: Path) -> None:
    config = config_with({"model.path": str(folder)})
    check_model(config)
    path = folder / "model.safetensors"
    write_safetensors(path, beside={k: v for k, v in shapes().items() if k != NORM})
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert str(caught.value) == (
        f"model.path must hold every tensor of a block: {path} has no {NORM}, which "
        "model.layers.0 has"
    )


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("embed_tokens", "embeddings"),
        ("lm_head", "lm_head.weight"),
        (".layers.1.", "layer 1"),
    ]
    + [(".layers.", "layer 0")],
)
def test_a_part_that_is_missing_is_named(part: str, named: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    drop(folder, part)
    rule = "model.path must hold every tensor of a LlamaForCausalLM"
    assert f"{rule}: {path} has no {named}" in problems(folder)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.embed_tokens.weight", (96, 8), "of shape [96, 8], not [100, 8]"),
        (NORM, (9,), f"has {NORM} of shape [9], and model.layers.0 of [8]"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_its_file(name, shape, said, folder):
    path = folder / "model.safetensors"
    write_safetensors(path, beside=shapes() | {name: shape})
    (problem,) = problems(folder)
    assert str(path) in problem and said in problem


def test_of_shards_those_count_to_which_the_index_leads(folder: Path) -> None:
    weights = folder / "model.safetensors"
    shard = folder / "model-1.safetensors"
    shutil.copy(weights, shard)
    index = folder / INDEX
    files = dict.fromkeys(shapes(), shard.name)
    index.write_text(json.dumps({"weight_map": files}))
    assert problems(folder) == []
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in files.items() if k != NORM}})
    )
    (problem,) = problems(folder)
    assert f"has no {NORM}" in problem


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_layer_is_needed_where_it_is_not_tied(
    is_tied: bool, folder: Path
) -> None:
    (folder / "config.json").write_text(
        json.dumps(SIZES | {"tie_word_embeddings": is_tied})
    )
    without = {k: v for k, v in shapes().items() if k != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", beside=without)
    assert len(problems(folder)) == (not is_tied)
    # A critic needs no output layer: it has a head of its own.
    assert not list(tensor_problems(folder, "critic.path", has_output=False))


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (None, False),
        ("last number", True),
        ("all", True),
        ("dtype", True),
        ("rows", True),
    ],
)
def test_an_output_layer_beside_tied_embeddings_must_be_equal(
    change: str | None, is_refused: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    monkeypatch.setattr(model_files, "_READ_BYTES", 96)
    (folder / "config.json").write_text(
        json.dumps(SIZES | {"tie_word_embeddings": True})
    )
    file = folder / "model.safetensors"
    tensors = {name: torch.zeros(shape) for name, shape in shapes().items()}
    embedding = torch.randn(100, 8)
    output = embedding.clone()
    if change == "last number":
        output[99, 7] += 1
    elif change == "all":
        output += 1
    elif change == "dtype":
        output = output.bfloat16()
    elif change == "rows":
        output = output[:50].clone()
    named = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    save_file(tensors | named, file)
    expected = (
        f"critic.path must hold no lm_head.weight that differs from model.embed_tokens.weight, as "
        f"config.json ties them (tie_word_embeddings), {file} has one"
    )
    assert list(tensor_problems(folder, "critic.path")) == [expected] * is_refused
    assert list(tensor_problems(folder, "critic.path", has_output=False)) == []
    (folder / "config.json").write_text(
        json.dumps(SIZES | {"tie_word_embeddings": False})
    )
    if change != "rows":
        assert problems(folder) == []


def drop(folder: Path, part: str) -> None:
    """Rewrites the weights of a folder without the tensors whose names hold `part`."""
    file = folder / "model.safetensors"
    shapes = {
        name: facts["shape"]
        for name, facts in read_header(file).items()
        if part not in name
    }
    write_safetensors(file, beside=shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_of_which_a_part_is_missing_is_refused_where_images_are_seen(
    family, tmp_path
):
    make_model(tmp_path / "whole", family)
    assert list(tensor_problems(tmp_path / "whole", "model.path", has_tower=True)) == []
    blocks = "visual.blocks.1."
    inside = "visual.blocks.0.norm1."
    tower = "visual."
    for number, part in enumerate((blocks, inside, tower)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        drop(folder, part)
        problem = next(iter(tensor_problems(folder, "critic.path", has_tower=True)), "")
        assert problem.startswith("critic.path must hold every tensor of a "), part
        assert list(tensor_problems(folder, "critic.path", has_tower=False)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_with_more_blocks_than_its_config_says_is_refused(family, tmp_path):
    make_model(tmp_path, family)
    path = tmp_path / "config.json"
    file = tmp_path / "model.safetensors"
    values = json.loads(path.read_text())
    assert values["vision_config"]["depth"] == 2
    values["vision_config"]["depth"] = 1
    path.write_text(json.dumps(values))
    assert list(tensor_problems(tmp_path, "model.path", has_tower=False)) == []
    (problem,) = tensor_problems(tmp_path, "model.path", has_tower=True)
    rule = "model.path must hold no more of a vision tower than vision_config says"
    assert re.match(
        rf"{rule}: {file} has \S+\.1\.\S+, which would be left out", problem
    )


@pytest.mark.parametrize("role", ["model", "reference", "critic"])
def test_a_text_class_with_a_tower_in_its_files_is_refused(
    role: str, folder: Path
) -> None:
    file = folder / "model.safetensors"
    name = "visual.patch_embed.proj.weight"
    write_safetensors(file, beside=shapes() | {name: (8, 3, 2, 14, 14)})
    assert list(tensor_problems(folder, f"{role}.path")) == [
        f"{role}.path must hold no vision tower for a LlamaForCausalLM, which sees no images: "
        f"{file} has {name}, which would be left out"
    ]


def test_a_text_class_with_a_tower_in_its_config_is_refused() -> None:
    for name in ("Qwen2ForCausalLM", "Ministral3ForCausalLM"):
        values = {
            "architectures": [name],
            "vision_config": {"depth": 2},
            "text_config": {},
        }
        with pytest.raises(ConfigError, match=f"a {name} must have no vision_config"):
            decoder_table(values)
        assert decoder_table(values | {"vision_config": None})["architectures"] == [
            name
        ]


KIMI = "KimiK25ForConditionalGeneration"


@pytest.mark.parametrize(
    ("stack", "message"), [("layers", ""), ("blocks", "has no layer 0")]
)
def test_an_idle_tower_is_left_out_and_a_decoder_of_other_names_is_refused(
    stack, message, folder
):
    """transformers 5.19 saves the layers as blocks, which no program loads."""
    values = {
        "architectures": [KIMI],
        "text_config": SIZES,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(values))
    decoder = {
        f"language_model.{name.replace('layers', stack)}": shape
        for name, shape in shapes().items()
    }
    tower = {
        "vision_tower.encoder.blocks.3.wo.weight": (4, 4),
        "mm_projector.proj.0.bias": (4,),
    }
    write_safetensors(folder / "model.safetensors", beside=decoder | tower)
    assert [problem for problem in problems(folder) if message not in problem] == []
    assert len(problems(folder)) == bool(message)
    sizes = read_model_sizes(folder)
    assert all(is_untrained(name, sizes) for name in tower)
    assert not any(is_untrained(name, sizes) for name in decoder)
    loaded = loaded_tensors(config_with({"model.path": str(folder)}))
    assert {name for name, _ in loaded} == decoder.keys()


@pytest.mark.parametrize("outer", [None, True, False])
def test_a_config_beside_an_idle_tower_says_whether_embeddings_are_tied(outer, folder):
    values = {
        "architectures": [KIMI],
        "text_config": SIZES | {"tie_word_embeddings": False},
    }
    said = {} if outer is None else {"tie_word_embeddings": outer}
    (folder / "config.json").write_text(json.dumps(values | said))
    if outer is False:
        assert not read_model_sizes(folder).has_tied_output
        return
    with pytest.raises(
        ConfigError, match=f"false beside its text_config.* got {outer}"
    ):
        read_model_sizes(folder)


@pytest.mark.parametrize("role", ["model", "reference"])
def test_every_folder_that_sees_images_has_its_tower(role: str, tmp_path: Path) -> None:
    for name in ("model", "reference"):
        make_model(tmp_path / name, "qwen3_vl")
        make_tokenizer(tmp_path / name)
    drop(tmp_path / role, "visual.blocks.1.")
    config = config_with(
        {
            "model.path": str(tmp_path / "model"),
            "algorithm.kl.coefficient": 0.1,
            "reference.path": str(tmp_path / "reference"),
        }
    )
    with pytest.raises(
        ConfigError, match=f"{role}.path must hold .* Qwen3VL.* no model.visual"
    ):
        check_model(config)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def test_a_folder_without_weights_is_found(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert missing_files(folder) == [
        f"model.path must hold safetensors weights, but {folder} has none"
    ]


def test_weights_that_the_hub_still_has_are_no_fault_of_the_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models--some--tiny" / "snapshots" / "c0ffee"
    (problem,) = missing_weights(folder, "model.path")
    assert problem == (
        f"model.path has no weights in the hub's cache yet, {folder}: a dry run brings none"
    )


def test_weights_that_were_cut_off_are_found(folder: Path) -> None:
    path = folder / "model.safetensors"
    write_safetensors(path, 1000)
    size = path.stat().st_size
    assert missing_files(folder) == []
    cut(path, size - 1)
    rule = "model.path must hold whole files"
    assert missing_files(folder) == [
        f"{rule}: {path} has {size - 1:,} of {size:,} bytes"
    ]


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 30])
def test_weights_that_end_within_their_header_are_found(
    num_bytes: int, folder: Path
) -> None:
    cut(folder / "model.safetensors", num_bytes)
    assert len(missing_files(folder)) == 1


@pytest.mark.parametrize(
    "text", ["version https://git-lfs.github.com/spec/v1\n", "<html></html>"]
)
def test_a_page_or_a_pointer_in_place_of_weights_is_found(
    text: str, folder: Path
) -> None:
    (folder / "model.safetensors").write_text(text)
    (problem,) = missing_files(folder)
    assert problem.endswith(
        f"{len(text)} bytes, does not begin as a safetensors file does"
    )


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_found(
    folder: Path,
) -> None:
    write_safetensors(folder / "model-1.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (problem,) = missing_files(folder)
    shard = folder / "model-2.safetensors"
    assert problem.endswith(f"{shard} is missing, which {index.name} names")
    write_safetensors(shard)
    # A tensor that the index does not name is not loaded.
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
    assert wrong.startswith(
        f"model.path must hold whole files: {folder / name} cannot be read: "
    )


def test_a_tokenizer_without_a_vocabulary_is_found(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (problem,) = missing_files(folder)
    assert problem.startswith(
        f"model.path must hold the tokenizer too, but {folder} has none of"
    )
    (folder / "tokenizer_config.json").unlink()
    (problem,) = missing_files(folder)
    assert problem.endswith("has no tokenizer_config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_cut_off_or_cannot_be_read_is_found(
    name: str, folder: Path
) -> None:
    (folder / name).write_text('{"model": {"vocab": {"a": 0}}\n')
    assert missing_files(folder, folder / "mine.jinja") == []
    (folder / name).write_text('{"model": {"vocab": {"a":')
    rule = f"model.path must hold the tokenizer too, but {folder / name}"
    assert missing_files(folder) == [f"{rule} is cut off: it does not end with }}"]
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    assert missing_files(folder) == [f"{rule} cannot be read: Input/output error"]


def test_a_tokenizer_without_a_chat_template_is_found(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (problem,) = missing_files(folder)
    assert problem.startswith("model.path must hold a tokenizer with a chat template")
    assert problem.endswith("name a file with one in rollout_server.chat_template")
    assert missing_files(folder, folder / "mine.jinja") == []
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert missing_files(folder) == []


def test_a_relative_path_that_is_not_there_says_where_it_was_looked_for(
    tmp_path, monkeypatch
):
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


def test_a_folder_with_an_adapter_that_nobody_applies_is_refused(folder: Path) -> None:
    write_safetensors(folder / "adapter_model.safetensors")
    for setting in ("model.path", "reference.path"):
        (problem,) = missing_weights(folder, setting)
        assert problem == (
            f"{setting} must not hold an adapter, as none is applied: merge it in {folder}"
        )


def write_tokenizer(folder: Path, vocabulary: object, added: int = 0) -> None:
    added_token = {
        "id": added,
        "content": "<x>",
    }
    table = {
        "model": {"vocab": vocabulary},
        "added_tokens": [added_token],
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(table))


def listed(words: list[str]) -> object:
    return [[word, 0.0] for word in words]


def numbered(words: list[str]) -> object:
    return {word: number for number, word in enumerate(words)}


@pytest.mark.parametrize("form", [listed, numbered])
def test_a_tokenizer_with_more_tokens_than_its_model_is_found(
    folder: Path,
    form: Callable[[list[str]], object],
) -> None:
    size = SIZES["vocab_size"]
    words = [f"t{number}" for number in range(size)]
    write_tokenizer(folder, form(words))
    assert not list(vocabulary_problems(folder))
    words.append("more")
    write_tokenizer(folder, form(words))
    (problem,) = vocabulary_problems(folder)
    sizes = f"has a token {size}, and config.json only {size} (vocab_size)"
    assert sizes in problem


def test_an_added_token_beyond_the_vocabulary_is_no_part_of_texts(folder: Path) -> None:
    size = SIZES["vocab_size"]
    write_tokenizer(folder, {"a": 0}, added=size)
    assert not list(vocabulary_problems(folder))


ODD_TOKENIZERS = (
    "",
    "{}",
    "[1]",
    '{"model": {}}',
    '{"model": null}',
)


@pytest.mark.parametrize("content", ODD_TOKENIZERS)
def test_a_vocabulary_of_another_form_is_left_to_its_loader(
    folder: Path,
    content: str,
) -> None:
    path = folder / "tokenizer.json"
    path.write_text(content)
    assert not list(vocabulary_problems(folder))
