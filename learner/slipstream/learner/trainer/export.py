"""The policy's weights as the Hugging Face checkpoint names them: for the wire, and as a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from slipstream.learner.trainer.model import Policy
from slipstream.learner.trainer.offload import Part
from slipstream.protocol.buckets import (
    Bucket,
    TensorSpec,
    layout_to_pb,
    plan_buckets,
)
from slipstream.protocol.config import Config
from slipstream.protocol.digests import bucket_digest, bucket_tensor_digests, weight_digest
from slipstream.v1 import weights_pb2
from torch import Tensor

MAX_SHARD_BYTES = 4 << 30
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass(frozen=True)
class ExportedWeights:
    """A whole set of weights on the CPU of rank 0, cut into the buckets in which they travel."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    # uint8, filled with zeros between tensors.
    buckets: tuple[Tensor, ...]
    # For each bucket, of each tensor.
    tensor_digests: tuple[tuple[bytes, ...], ...]

    @property
    def digests(self) -> list[bytes]:
        """Of each bucket."""
        return [bucket_digest(digests) for digests in self.tensor_digests]

    @property
    def digest(self) -> bytes:
        """Identity of the weights."""
        names = (tensor.name for tensor in self.tensors)
        digests = (digest for bucket in self.tensor_digests for digest in bucket)
        return weight_digest(dict(zip(names, digests, strict=True)))

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors; tied ones count once."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """What travels to each receiver."""
        return sum(bucket.numel() for bucket in self.buckets)

    def layout(self) -> weights_pb2.WeightLayout:
        """From which a receiver derives the same buckets."""
        return layout_to_pb(self.tensors, self.bucket_bytes)


@torch.no_grad()
def hf_tensors(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Name and CPU tensor of every weight; collective: every rank iterates to the end.

    A tensor may share its memory with the model: copy what is kept beyond the next step, and unless
    the parameters stay in memory anyway, beyond the next tensor.
    """
    with policy.memory.resident(Part.PARAMETERS):
        policy.gather_parameters()
        for name, weight in policy.bridge.export_hf_weights(
            policy.chunks, cpu=True, show_progress=False
        ):
            if name in _VOCABULARY:
                # Rows beyond are padding.
                weight = weight[: policy.vocab_size]
            yield name, weight.detach().to(dtype).contiguous()


def export_weights(policy: Policy, config: Config) -> ExportedWeights | None:
    """The weights for the wire, on rank 0; None on the others. Collective."""
    with policy.memory.resident(Part.PARAMETERS):
        return _export(policy, config)


def _export(policy: Policy, config: Config) -> ExportedWeights | None:
    wire_dtype = config.weights.wire_dtype or config.model.dtype
    named = []
    for name, tensor in hf_tensors(policy, getattr(torch, wire_dtype)):
        if policy.ranks.is_main:
            named.append((TensorSpec(name, wire_dtype, tuple(tensor.shape)), tensor))
    if not policy.ranks.is_main:
        return None
    # Experts come in the order of the ranks that hold them; the digest must not depend on it.
    named.sort(key=lambda pair: pair[0].name)
    specs = tuple(spec for spec, _ in named)
    by_name = {spec.name: tensor for spec, tensor in named}
    bucket_bytes = config.weights.bucket_mib << 20
    plan = plan_buckets(specs, bucket_bytes)
    buckets = tuple(_fill(bucket, by_name) for bucket in plan)
    digests = tuple(
        tuple(bucket_tensor_digests(bucket, data.numpy().data))
        for bucket, data in zip(plan, buckets, strict=True)
    )
    return ExportedWeights(specs, bucket_bytes, buckets, digests)


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
        from safetensors.torch import save_file

        save_file(self._waiting, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _shard_path(self, place: int) -> Path:
        return self._folder / f"shard-{place}.safetensors"


def _fill(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for span in bucket.spans:
        raw = tensors[span.tensor.name].reshape(-1).view(torch.uint8)
        data[span.offset_bytes : span.offset_bytes + raw.numel()] = raw
    return data
