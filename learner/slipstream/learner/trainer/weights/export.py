"""The policy's weights under the names of its Hugging Face checkpoint, as tensors or a folder."""

import contextlib
import itertools
import json
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from slipstream.core.models.model_files import held_tensors, is_untrained
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.run_folder import EXPORT_VERSION
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork, write_safetensors
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.model.model_part import LayerBeside
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.weights.export_plan import VOCABULARY, exported_type, peft_name
from slipstream.learner.trainer.weights.run_chat import RunChat
from slipstream.protocol.checkpoints import (
    PARTIAL_SUFFIX,
    replace_folder,
    write_export_manifest,
)
from torch import Tensor

# Settings and tensors of each named adapter, by its name.
AdapterTensors: TypeAlias = dict[str, tuple[Config, dict[str, Tensor]]]
MAX_SHARD_BYTES = 4 << 30
# Files that training makes stale in a model's folder: the weights, in all forms.
_STALE = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.pt",
    "*.pth",
    "*.onnx",
    "*.onnx_data",
    "onnx",
    "openvino",
    "original",
    "adapter_config.json",
    "draft",
    ".git",
    ".cache",
)
# How the names of copies end that layers for further tokens may have -> what they are copies of.
_COPIES = {
    ".embed_tokens.weight": "model.embed_tokens.weight",
    ".shared_head.head.weight": "lm_head.weight",
}


@torch.no_grad()
def hf_tensors(
    policy: Policy, dtype: torch.dtype, *, to_host: bool = True, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of every weight; collective: every rank must iterate to the end.

    Without `merge` the matrices lack the adapters' products. Without `to_host` the tensors are on
    the device. A tensor may share its memory with the model, so copy a tensor that is used after
    the next training step or, if parameters are offloaded, after the next tensor is yielded.
    """
    with policy.memory.resident(MemoryPart.PARAMETERS):
        policy.gather_parameters()
        tasks = None
        if merge and _adapted_experts(policy):
            from slipstream.learner.trainer.layers.expert_adapters import merged_tasks

            tasks = merged_tasks(policy.bridge.get_conversion_tasks(policy.chunks))
        for name, weight in policy.bridge.export_hf_weights(
            policy.chunks,
            cpu=to_host,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=merge,
        ):
            if name.endswith(VOCABULARY):
                # Rows beyond the vocabulary are padding.
                weight = weight[: policy.vocab_size]
            name = name.replace(".base_layer.", ".")
            yield name, weight.detach().to(exported_type(name, dtype)).contiguous()


@torch.no_grad()
def adapter_tensors(
    policy: Policy, dtype: torch.dtype, *, to_host: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields A and B of every adapter by PEFT's names; iterate and copy as for `hf_tensors`."""
    from slipstream.learner.trainer.layers.expert_adapters import factor_tasks

    has_vision = policy.vision is not None
    with policy.memory.resident(MemoryPart.PARAMETERS):
        policy.gather_parameters()
        for name, weight in policy.bridge.export_adapter_weights(
            policy.chunks, cpu=to_host, show_progress=False
        ):
            path, factor, _ = name.rsplit(".", 2)
            name = peft_name(f"{path}.weight", factor, has_vision=has_vision)
            yield name, weight.detach().to(dtype).contiguous()
        matrices = _adapted_experts(policy)
        for factor in ("lora_A", "lora_B") if matrices else ():
            tasks = policy.bridge.get_conversion_tasks(policy.chunks)
            for name, weight in policy.bridge.export_hf_weights(
                policy.chunks,
                cpu=to_host,
                show_progress=False,
                conversion_tasks=factor_tasks(tasks, factor, matrices),
                merge_adapter_weights=False,
            ):
                name = peft_name(name, factor, has_vision=has_vision)
                yield name, weight.detach().to(dtype).contiguous()


def _adapted_experts(policy: Policy) -> list[str]:
    """Returns name parts of the expert matrices that have adapters on any rank; collective."""
    if policy.chunks[0].config.num_moe_experts is None:
        return []
    matrices = [f".mlp.experts.{name}." for name in ("linear_fc1", "linear_fc2")]
    here = [name for chunk in policy.chunks for name, _ in chunk.named_parameters()]
    flags = torch.tensor([float(any(f"{m}adapter." in name for name in here)) for m in matrices])
    adapted = policy.ranks.max(flags).tolist()
    return [name for name, flag in zip(matrices, adapted, strict=True) if flag]


def save_hf_folder(policy: Policy, source: Path, target: Path, chat: RunChat) -> None:
    """Writes the weights into `target`, with configuration and tokenizer of `source`; collective.

    `chat` takes the place of the chat template and the ends of replies of `source`.
    `target` appears only once it is complete; an existing `target` is replaced. Raises
    CheckpointError as `DiskWork.wait` does.
    """
    ranks = policy.ranks
    disk = DiskWork(target.parent, ranks)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    # Only rank 0 adds tensors.
    writer = HfFolderWriter(partial, disk.moved)
    disk.on_main(lambda: writer.begin(source, chat))
    # On a CPU an exported tensor can be the model's own memory, which offloading takes away.
    keeps = Tensor.clone if policy.memory.offloads(MemoryPart.PARAMETERS) else Tensor.detach
    with policy.memory.resident(MemoryPart.PARAMETERS):
        for name, tensor in hf_tensors(policy, policy.dtype):
            ranks.activity.note()
            is_full = b"" if writer.has_room(tensor) else b"full"
            if ranks.broadcast_bytes(is_full if ranks.is_main else None):
                disk.on_main(writer.flush)
            if ranks.is_main:
                writer.add(name, keeps(tensor))
    # All ranks wait here while the main rank copies.
    disk.on_main(lambda: writer.copy_untrained(source))
    layer = policy.drafts
    if layer is not None:
        disk.on_main(lambda: writer.write_draft(layer, policy.dtype))
    dtype = str(policy.dtype).removeprefix("torch.")
    disk.on_main(lambda: writer.finish(dtype, target))


def collected_adapters(policy: Policy, config: Config) -> AdapterTensors:
    """Returns settings and copied tensors of each named adapter by its name, on rank 0; collective.

    The others get settings alone. Adapters of clients have their newest values, published or not,
    with their own rank and alpha, on the matrices that they train; one that no client has used is
    left out.
    """
    adapters = policy.adapters
    collected: AdapterTensors = {}
    for adapter in adapters.sizes if adapters.are_clients else adapters.names:
        adapter_config = config
        tensors = dict[str, Tensor]()
        with adapters.active(adapter):
            for name, weight in adapter_tensors(policy, policy.dtype):
                if policy.ranks.is_main:
                    # Fused matrices share their first factor; a file holds no tensor twice.
                    tensors[name] = weight.clone()
        if adapters.are_clients:
            rank, alpha = adapters.sizes[adapter]
            lora = config.lora.model_copy(update={"rank": rank, "alpha": alpha})
            adapter_config = config.model_copy(update={"lora": lora})
            trained: dict[str, Tensor] = {}
            for name, first in tensors.items():
                # The first factor is drawn: it is 0 only on a matrix that a client does not train.
                if ".lora_A." in name and first.any():
                    second = name.replace(".lora_A.", ".lora_B.")
                    trained[name] = first[:rank].contiguous()
                    trained[second] = tensors[second][:, :rank].contiguous()
            tensors = trained
        collected[adapter] = adapter_config, tensors
    return collected


def write_adapters(
    collected: AdapterTensors,
    target: Path,
    chat: RunChat,
    moved: Callable[[int], None],
    *,
    description: bytes = b"",
) -> None:
    """Writes what `collected_adapters` has returned into `target`, on rank 0.

    `target` appears only once it is complete; an existing `target` is replaced. A `description`
    is a file of its own. Raises OSError.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    if not collected:
        partial.mkdir(parents=True)
    for adapter, (adapter_config, tensors) in collected.items():
        write_adapter(tensors, adapter_config, partial / adapter, moved)
        chat.write(partial / adapter)
    if description:
        (partial / EXPORT_VERSION).write_bytes(description)
    if collected:
        write_export_manifest(partial, moved)
    replace_folder(partial, target)


def save_adapters(policy: Policy, config: Config, target: Path, chat: RunChat) -> None:
    """Writes only the adapters into `target`, in the format of the library PEFT; collective.

    Each named adapter has its own folder inside `target`. `target` appears only once it is
    complete; an existing `target` is replaced. Raises CheckpointError as `DiskWork.wait` does.
    """
    collected = collected_adapters(policy, config)
    disk = DiskWork(target.parent, policy.ranks)
    disk.on_main(
        lambda: write_adapters(
            collected,
            target,
            chat,
            disk.moved,
        )
    )


def _targets(tensors: Collection[str], config: Config) -> dict[str, Any]:
    """Returns PEFT's settings that name the matrices with adapters.

    PEFT takes the names of experts' matrices for the parameter of all experts. So matrices of the
    same names elsewhere, of shared experts and dense layers, are named as parameters. For a model
    with vision the target is a regular expression for whole module names, because names may end
    alike in the vision tower and the decoder.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    paths = sorted({name.partition(".lora_")[0] for name in tensors})
    names = sorted({path.rpartition(".")[2] for path in paths})
    if any(".language_model." in path for path in paths):
        return {"target_modules": rf".*\.language_model\..*\.({'|'.join(names)})"}
    experts = {path.rpartition(".")[2] for path in paths if ".experts." in path}
    kind = json.loads((config.model.path / "config.json").read_bytes()).get("model_type")
    # Models with code of their own keep a matrix for each expert; `kinds` adds none of them here.
    if not experts or kind not in CONFIG_MAPPING_NAMES:
        return {"target_modules": names}
    ends = {".".join(path.split(".")[-2:]) for path in paths if ".experts." not in path}
    parameters = [f"{end}.weight" for end in ends if end.rpartition(".")[2] in experts]
    return {"target_modules": names, "target_parameters": sorted(parameters)}


def write_adapter(
    tensors: dict[str, Tensor], config: Config, folder: Path, moved: Callable[[int], None]
) -> None:
    """Writes one adapter into a new `folder` as PEFT reads it; `moved` gets the bytes written."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors, moved)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model.path),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "bias": "none",
        "inference_mode": True,
        **_targets(tensors, config),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))


class HfFolderWriter:
    """Writes a model folder with safetensors files of bounded size, only one of them in memory.

    Call `begin`, then `add` for each tensor, with a `flush` before a tensor that has no room, then
    `finish`. If a write fails, the whole folder is removed.
    """

    def __init__(self, folder: Path, moved: Callable[[int], None]) -> None:
        self._folder = folder
        self._moved = moved
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def begin(self, source: Path, chat: RunChat) -> None:
        """Creates or replaces the folder: `source` without weights, with what `chat` writes."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        with self._removed_on_failure():
            shutil.copytree(source, self._folder, ignore=shutil.ignore_patterns(*_STALE))
            # A shared model's files and folders may be read-only, and their copies are as well.
            for path in (self._folder, *self._folder.rglob("*")):
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
            chat.write(self._folder)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether the next file has room for this tensor; an empty file has room for any."""
        fits = self._waiting_bytes + tensor.nbytes <= MAX_SHARD_BYTES
        return fits or not self._waiting

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor to the next file, which `flush` or `finish` writes."""
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes

    def copy_untrained(self, source: Path) -> None:
        """Adds tensors of `source` that are not trained; copies of trained ones stay copies."""
        sizes = read_model_sizes(source)
        source_tensors = held_tensors(source)
        written = {*self._waiting, *itertools.chain.from_iterable(self._shards)}
        for name, (path, _) in source_tensors.items():
            if name in written or not is_untrained(name, sizes):
                continue
            tensor = _read(path, name)
            original = next((_COPIES[end] for end in _COPIES if name.endswith(end)), "")
            if original in written and torch.equal(
                tensor, _read(source_tensors[original][0], original)
            ):
                if original in self._waiting:
                    tensor = self._waiting[original].clone()
                else:
                    number = next(n for n, shard in enumerate(self._shards) if original in shard)
                    tensor = _read(self._shard_path(number), original)
            if not self.has_room(tensor):
                self.flush()
            self.add(name, tensor)

    def write_draft(
        self, layer: LayerBeside, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Writes the layer that drafts into the folder's own folder `draft`, as vLLM loads it.

        Without `tensors`, which were copied from it before, it has the layer's present ones.
        """
        folder = self._folder / "draft"
        values = layer.named() if tensors is None else tensors
        tensors = {name: value.to("cpu", dtype) for name, value in values.items()}
        with self._removed_on_failure():
            layer.write_folder(folder, str(dtype).removeprefix("torch."))
            write_safetensors(folder / "model.safetensors", tensors, self._moved)

    def finish(self, dtype: str, target: Path) -> None:
        """Writes last file, index and element type; then the folder replaces `target`."""
        self.flush()
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
        values = json.loads(settings.read_bytes())
        values.pop("torch_dtype", None)
        values["dtype"] = dtype
        settings.write_text(json.dumps(values, indent=2))
        write_export_manifest(self._folder, self._moved)
        replace_folder(self._folder, target)

    def flush(self) -> None:
        """Writes all tensors that were added since the last file into one file."""
        with self._removed_on_failure():
            write_safetensors(self._shard_path(len(self._shards)), self._waiting, self._moved)
        self._shards.append(list(self._waiting))
        self._total_bytes += self._waiting_bytes
        self._waiting = {}
        self._waiting_bytes = 0

    @contextlib.contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Removes the folder if the block raises OSError: its files would keep a full disk full."""
        try:
            yield
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _shard_path(self, place: int) -> Path:
        return self._folder / f"shard-{place}.safetensors"


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
