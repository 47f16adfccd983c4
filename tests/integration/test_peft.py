"""PEFT reads exported adapters: its logits are those of the merged model.

It needs PEFT and accelerate, which the locks lack because transformers behaves otherwise with them:
`make test-peft` installs requirements/peft.txt in a folder of its own.
"""

import shutil
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.settings.role_sections import FUSED, matrices_named
from slipstream.learner.trainer.weights.export import write_adapter
from slipstream.learner.trainer.weights.export_plan import peft_name
from support.fakes.parity_models import make_models
from support.references.plain_policy import plain_model

peft: Any = pytest.importorskip(
    "peft", reason="PEFT is not installed here: make test-peft has it"
)

RANK = 4
ALPHA = 8.0
ADAPTED = {part for parts in matrices_named(FUSED).values() for part in parts}
# Qwen3-Next joins the inputs of delta nets; MiniMax M2 names its experts' matrices otherwise.
ADAPTED |= {"in_proj_qkvz", "in_proj_ba", "w1", "w2", "w3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, num_layers=2)
    return folder


def logits(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    model = plain_model(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(5, 45).view(2, 20)).logits
    return logits


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "deepseek",
        "kimi25",
        "glm",
        "glm-lite",
        "minimax",
        "moe",
        "moe-softmax",
        "moonlight",
        "qwen3-next",
        "qwen35",
    ],
)
def test_peft_reads_every_adapter_of_an_exported_folder(
    name, folder: Path, tmp_path: Path
) -> None:
    merged = load_file(folder / name / "model.safetensors")
    adapters = {}
    draw = torch.Generator().manual_seed(1)
    for key, weight in list(merged.items()):
        # PEFT does not find the experts of a Kimi K2.5, so their adapters are refused.
        is_left_out = name == "kimi25" and ".self_attn." not in key
        if weight.ndim == 2 and key.split(".")[-2] in ADAPTED and not is_left_out:
            a = torch.randn(RANK, weight.shape[1], generator=draw) / 10
            b = torch.randn(weight.shape[0], RANK, generator=draw) / 10
            adapters[peft_name(key, "lora_A", has_vision=False)] = a
            adapters[peft_name(key, "lora_B", has_vision=False)] = b
            merged[key] = weight + ALPHA / RANK * b @ a
    lora = types.SimpleNamespace(rank=RANK, alpha=ALPHA)
    config: Any = types.SimpleNamespace(
        lora=lora, model=types.SimpleNamespace(path=folder / name)
    )
    write_adapter(adapters, config, tmp_path / "adapters", lambda _: None)
    shutil.copytree(folder / name, tmp_path / "merged")
    save_file(
        merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = logits(folder / name, tmp_path / "adapters")
    torch.testing.assert_close(read, logits(tmp_path / "merged"), rtol=0, atol=1e-4)
    assert (read - logits(folder / name)).abs().max() > 0.1
