"""The ends of replies in an exported folder, as transformers and vLLM read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.weights.export import HfFolderWriter
from slipstream.learner.trainer.weights.run_chat import RunChat
from support.fakes.chat_models import make_chat_model
from support.fakes.small_configs import small_config

PROMPT = [1, 40, 41]
MOST_TOKENS = 8


def config_of(model: Path, **sampling: object) -> Config:
    table = {
        "path": str(model),
        "dtype": "float32",
    }
    return small_config(model=table, sampling=sampling)


def exported(config: Config, folder: Path) -> Path:
    source = config.model.path
    partial = folder.with_name("partial")
    writer = HfFolderWriter(partial, lambda _: None)
    writer.begin(source, RunChat.of(config))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish("float32", folder)
    return folder


def generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    table: dict[str, Any] = json.loads(path.read_text())
    return table


@pytest.mark.parametrize("has_file", [True, False])
def test_an_export_names_all_tokens_that_end_a_reply(
    tmp_path: Path, *, has_file: bool
) -> None:
    model = make_chat_model(tmp_path / "model")
    if not has_file:
        (model / "generation_config.json").unlink()
    config = config_of(model, stop_token_ids=[7, 8])
    folder = exported(config, tmp_path / "out")
    table = generation(folder)
    assert table["eos_token_id"] == [2, 7, 8]
    assert table["bos_token_id"] == 1
    assert table["pad_token_id"] == 0
    assert not (folder / "README.md").exists()


def test_an_export_keeps_a_file_that_names_all_ends(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    path = model / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 9],  "temperature": 0.6}')
    folder = exported(config_of(model), tmp_path / "out")
    assert (folder / "generation_config.json").read_text() == path.read_text()


def test_transformers_ends_a_reply_at_each_end(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    tokens = sampled(model)
    assert len(tokens) == MOST_TOKENS
    end = tokens[1]
    config = config_of(model, stop_token_ids=[end])
    folder = exported(config, tmp_path / "out")
    num_tokens = tokens.index(end) + 1
    assert sampled(folder) == tokens[:num_tokens]


def sampled(folder: Path) -> list[int]:
    """Returns the most probable reply of a model to a fixed prompt, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    sequences = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=MOST_TOKENS,
    )
    tokens: list[int] = sequences[0].tolist()
    return tokens[len(PROMPT) :]


@pytest.mark.process
def test_vllm_reads_each_end(tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    model = make_chat_model(tmp_path / "model")
    config = config_of(model, stop_token_ids=[7, 8])
    folder = exported(config, tmp_path / "out")
    generation_config = try_get_generation_config(str(folder), trust_remote_code=False)
    assert generation_config is not None
    parameters = SamplingParams()
    parameters.update_from_generation_config(
        generation_config.to_diff_dict(),
        eos_token_id=2,
    )
    assert sorted(parameters.stop_token_ids) == [7, 8]


def test_texts_that_end_a_reply_are_told_in_words(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    config = config_of(model, stop=["###", "é"])
    folder = exported(config, tmp_path / "out")
    readme = folder / "README.md"
    note = readme.read_text()
    assert "as `stop` to vLLM's API" in note
    assert '`["###", "é"]`' in note
    # With `stop_strings` there, transformers refuses each `generate` without a tokenizer.
    assert "stop_strings" not in generation(folder)


def test_adapters_name_ends_that_their_base_lacks(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    folder = tmp_path / "adapter"
    folder.mkdir()
    chat = RunChat.of(config_of(model))
    chat.write(folder)
    assert list(folder.iterdir()) == []
    chat = RunChat.of(config_of(model, stop_token_ids=[7]))
    chat.write(folder)
    table = generation(folder)
    assert table["eos_token_id"] == [2, 7]
    readme = folder / "README.md"
    assert "--generation-config" in readme.read_text()
