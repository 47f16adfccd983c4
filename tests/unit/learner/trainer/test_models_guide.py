"""The guide to models writes published folders anew: experts in MXFP4, decoders beside a tower."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.models.model_rules import model_problems
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.learner.trainer.tiny_model import make_tokenizer
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    GptOssConfig,
    GptOssForCausalLM,
    Mistral3Config,
    PreTrainedConfig,
)

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "models.md"
# The numbers that four bits stand for, by the OCP's MX specification.
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrices [experts, columns, rows] in which a token is multiplied by them."""
    values = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    # A byte has its first number in the low bits; 32 numbers share a power of two.
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
    powers = torch.exp2(scales.float() - 127)
    return (values[halves].flatten(-2) * powers[..., None]).flatten(-2).mT


def make_source(folder: Path) -> dict[str, torch.Tensor]:
    """A tiny gpt-oss as it is published; returns the tensors that its files stand for."""
    config = GptOssConfig(
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention"],
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    make_tokenizer(folder)
    stored = {}
    meant = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
        scales = torch.randint(120, 130, shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = numbers_of(blocks, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(settings))
    return meant


def test_the_lines_of_the_guide_write_the_numbers_that_the_bits_stand_for(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    meant = make_source(source)
    (text,) = re.findall(
        r"```python\n(.*?Mxfp4Config.*?)```", PAGE.read_text(), re.DOTALL
    )
    text = text.replace('"gpt-oss-20b"', repr(str(source)))
    program = tmp_path / "program.py"
    program.write_text(text.replace('"gpt-oss-20b-bf16"', repr(str(target))))
    runpy.run_path(str(program))
    tensors = load_file(target / "model.safetensors")
    assert tensors.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(tensors[name].float(), tensor.float()), name
    settings = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in settings
    assert settings["dtype"] == "bfloat16"
    assert (target / "tokenizer.json").is_file()


def config_beside(kind: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = {
        **sizes,
        "intermediate_size": 96,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    }
    tower = {**sizes, "intermediate_size": 48, "image_size": 56, "patch_size": 14}
    if kind == "Gemma3":
        return Gemma3Config(
            text_config=decoder, vision_config=tower, mm_tokens_per_image=4
        )
    text = {**decoder, "model_type": "ministral3"}
    pixtral = {**tower, "model_type": "pixtral"}
    return Mistral3Config(
        text_config=text, vision_config=pixtral, tie_word_embeddings=False
    )


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_the_lines_of_the_guide_write_the_decoder_that_stands_beside_a_tower(
    kind, tmp_path
):
    source = tmp_path / "source"
    target = tmp_path / "target"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_beside(kind)).bfloat16()
    model.save_pretrained(source)
    make_tokenizer(source)
    (text,) = re.findall(
        r"```python\n([^`]*?ImageTextToText.*?)```", PAGE.read_text(), re.DOTALL
    )
    text = text.replace('"gemma-3-4b-it"', repr(str(source)))
    program = tmp_path / "program.py"
    program.write_text(text.replace('"gemma-3-4b-it-text"', repr(str(target))))
    runpy.run_path(str(program))
    tensors = load_file(target / "model.safetensors")
    decoder = model.model.language_model.state_dict()
    expected = {f"model.{name}": tensor for name, tensor in decoder.items()}
    if kind == "Mistral3":
        expected["lm_head.weight"] = model.lm_head.weight
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    sizes = read_model_sizes(target)
    assert list(model_problems(sizes)) == []
    assert (
        sizes.architecture
        == {"Gemma3": "Gemma3", "Mistral3": "Ministral3"}[kind] + "ForCausalLM"
    )
    assert sizes.has_tied_output == (kind == "Gemma3")
