"""The policy's weights as the Hugging Face checkpoint names them, by Bridge, and as a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.offload import Part
from slipstream.learner.trainer.tensor_files import save_tensors
from slipstream.learner.trainer.weights.export_plan import VOCABULARY
from torch import Tensor

MAX_SHARD_BYTES = 4 << 30
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@torch.no_grad()
def hf_tensors(
    policy: Policy, dtype: torch.dtype, *, to_host: bool = True, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight; collective: every rank iterates to the end.

    Without `merge` matrices are as they were before adapters were put on them.

    A tensor may share its memory with the model: copy what is kept beyond the next step, and unless
    the parameters stay in memory anyway, beyond the next tensor.
    """
    with policy.memory.resident(Part.PARAMETERS):
        policy.gather_parameters()
        for name, weight in policy.bridge.export_hf_weights(
            policy.chunks, cpu=to_host, show_progress=False, merge_adapter_weights=merge
        ):
            if name in VOCABULARY:
                # Rows beyond are padding.
                weight = weight[: policy.vocab_size]
            name = name.replace(".base_layer.", ".")
            yield name, weight.detach().to(dtype).contiguous()


@torch.no_grad()
def adapter_tensors(
    policy: Policy, dtype: torch.dtype, *, to_host: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """As `hf_tensors`: both factors of every adapter, by PEFT's names."""
    with policy.memory.resident(Part.PARAMETERS):
        policy.gather_parameters()
        for name, weight in policy.bridge.export_adapter_weights(
            policy.chunks, cpu=to_host, show_progress=False
        ):
            yield f"base_model.model.{name}", weight.detach().to(dtype).contiguous()


def save_hf_folder(policy: Policy, source: Path, target: Path) -> None:
    """Writes the weights with the configuration and tokenizer of `source`; collective.

    `target` appears only when it is whole; one that is there already is replaced.
    """
    partial = target.with_name(target.name + ".partial")
    writer = HfFolderWriter(source, partial) if policy.ranks.is_main else None
    with policy.memory.resident(Part.PARAMETERS):
        for name, tensor in hf_tensors(policy, policy.dtype):
            if writer is not None:
                writer.add(name, tensor)
    if writer is not None:
        writer.finish(str(policy.dtype).removeprefix("torch."))
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)


class HfFolderWriter:
    """Writes a folder in safetensors files of bounded size, so that only one is in memory.

    Everything of `source` but its weights is copied.
    """

    def __init__(
        self, source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a file when this tensor would make it too large."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes

    def finish(self, dtype: str) -> None:
        """Writes the rest, the index, and the element type into the configuration."""
        self._flush()
        number = len(self._shards)
        names = (
            ["model.safetensors"]
            if number == 1
            else [f"model-{place:05}-of-{number:05}.safetensors" for place in range(1, number + 1)]
        )
        for place, name in enumerate(names):
            self._shard_path(place).rename(self._folder / name)
        if number > 1:
            where = {
                tensor: name
                for name, shard in zip(names, self._shards, strict=True)
                for tensor in shard
            }
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2))
        settings = self._folder / "config.json"
        values = json.loads(settings.read_text())
        values.pop("torch_dtype", None)
        values["dtype"] = dtype
        settings.write_text(json.dumps(values, indent=2))

    def _flush(self) -> None:
        save_tensors(self._waiting, self._shard_path(len(self._shards)))
        self._shards.append(list(self._waiting))
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _shard_path(self, place: int) -> Path:
        return self._folder / f"shard-{place}.safetensors"
