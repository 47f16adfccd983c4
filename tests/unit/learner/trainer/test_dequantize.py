"""A folder of gpt-oss with MXFP4 experts becomes one in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.dequantize import dequantize, main

# The numbers that four bits stand for, by the OCP's MX specification.
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXPERTS, ROWS, COLUMNS = 2, 6, 64


def numbers_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrices [experts, columns, rows] in which a token is multiplied by them."""
    values = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    # A byte has its first number in the low bits; 32 numbers share a power of two.
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
    powers = torch.exp2(scales.float() - 127)
    return (values[halves].flatten(-2) * powers[..., None]).flatten(-2).mT


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, ROWS, COLUMNS // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, shape[:-1], generator=generator, dtype=torch.uint8)
    # A matrix and its scales may lie in different files.
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.randn(EXPERTS, ROWS, generator=generator)
    save_file({f"{name}_blocks": blocks, f"{name}_bias": bias}, folder / "one.safetensors")
    save_file({f"{name}_scales": scales}, folder / "two.safetensors")
    settings = {"quantization_config": {"quant_method": "mxfp4"}, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_experts_are_the_numbers_that_their_bits_stand_for(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    dequantize(source, target)
    found = load_file(target / "model.safetensors")
    stored = load_file(source / "one.safetensors") | load_file(source / "two.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert set(found) == {name, f"{name}_bias"}
    expected = numbers_of(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert found[name].shape == (EXPERTS, COLUMNS, ROWS)
    assert found[name].is_contiguous()
    assert torch.equal(found[name].float(), expected)
    assert torch.equal(found[f"{name}_bias"], stored[f"{name}_bias"].bfloat16())


def test_a_file_that_the_index_does_not_name_is_not_read(source: Path, tmp_path: Path) -> None:
    bias = "model.layers.0.mlp.experts.gate_up_proj_bias"
    save_file({bias: torch.zeros(1), "old": torch.zeros(1)}, source / "z.safetensors")
    places = {name: "one.safetensors" for name in load_file(source / "one.safetensors")}
    places |= {name: "two.safetensors" for name in load_file(source / "two.safetensors")}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    dequantize(source, tmp_path / "target")
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert "old" not in found
    assert found[bias].shape == (EXPERTS, ROWS)


def test_the_new_folder_says_that_it_is_not_quantized(source: Path, tmp_path: Path) -> None:
    assert main_with(source, tmp_path / "target") == 0
    settings = json.loads((tmp_path / "target" / "config.json").read_text())
    assert settings == {"dtype": "bfloat16", "num_hidden_layers": 1}
    assert (tmp_path / "target" / "tokenizer.json").is_file()
    assert not list(tmp_path.glob("*.partial"))


def test_another_quantization_is_refused(source: Path, tmp_path: Path) -> None:
    settings = {"quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"must be mxfp4, got 'fp8'$"):
        dequantize(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def main_with(*arguments: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["dequantize", *map(str, arguments)])
        return main()
