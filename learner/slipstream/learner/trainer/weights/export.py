"""The policy's weights under the names of its Hugging Face checkpoint, as tensors or a folder."""

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from slipstream.core.settings.config import Config
from slipstream.core.settings.lora_section import DELTA, FUSED, LATENT
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.checkpoints.files import write_safetensors
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.offload import Part
from slipstream.learner.trainer.weights.export_plan import VOCABULARY, exported_type, peft_name
from slipstream.learner.trainer.weights.hf_folder import HfFolderWriter
from slipstream.protocol.checkpoints import PARTIAL_SUFFIX
from torch import Tensor


@torch.no_grad()
def hf_tensors(
    policy: Policy, dtype: torch.dtype, *, to_host: bool = True, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of every weight; collective: every rank iterates to the end.

    Without `merge` matrices lack the adapters' products. A tensor may share its memory with the
    model: copy a tensor that is kept beyond the next training step. If parameters are offloaded,
    copy a tensor that is kept beyond the next tensor.
    """
    from slipstream.learner.trainer.adapters.expert_adapters import merged_tasks

    with policy.memory.resident(Part.PARAMETERS):
        policy.gather_parameters()
        tasks = None
        if merge and _adapted_experts(policy):
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
    """Yields both factors of every adapter by PEFT's names, with the rules of `hf_tensors`."""
    from slipstream.learner.trainer.adapters.expert_adapters import factor_tasks

    has_vision = policy.vision is not None
    with policy.memory.resident(Part.PARAMETERS):
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
    """Returns parts of the names of experts' matrices with adapters, on any rank; collective."""
    if policy.chunks[0].config.num_moe_experts is None:
        return []
    from slipstream.learner.trainer.adapters.expert_adapters import adapted_names

    matrices = [f".mlp.experts.{name}." for name in ("linear_fc1", "linear_fc2")]
    here = adapted_names(policy.chunks)
    flags = torch.tensor([float(any(each in name for name in here)) for each in matrices])
    found = policy.ranks.max(flags).tolist()
    return [name for name, flag in zip(matrices, found, strict=True) if flag]


def save_hf_folder(policy: Policy, source: Path, target: Path) -> None:
    """Writes the weights with the configuration and tokenizer of `source`; collective.

    `target` appears only when it is complete; an existing `target` is replaced. Raises the
    CheckpointErrors of `DiskWork`.
    """
    ranks = policy.ranks
    disk = DiskWork(target.parent, ranks)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    writer = HfFolderWriter(partial, disk.moved) if ranks.is_main else None
    disk.together(lambda: writer.begin(source) if writer is not None else None)
    # On a CPU an exported tensor can be the model's own memory, which offloading takes away.
    keeps = Tensor.clone if policy.memory.offloads(Part.PARAMETERS) else Tensor.detach
    with policy.memory.resident(Part.PARAMETERS):
        for name, tensor in hf_tensors(policy, policy.dtype):
            ranks.activity.note()
            is_full = b"full" if writer is not None and not writer.has_room(tensor) else b""
            if ranks.broadcast_bytes(is_full if ranks.is_main else None):
                disk.together(lambda: writer.flush() if writer is not None else None)
            if writer is not None:
                writer.add(name, keeps(tensor))
    # Each rank waits here while the main rank copies.
    disk.together(lambda: writer.copy_untrained(source) if writer is not None else None)
    dtype = str(policy.dtype).removeprefix("torch.")
    disk.together(lambda: writer.finish(dtype, target) if writer is not None else None)


def save_adapters(policy: Policy, config: Config, target: Path) -> None:
    """Writes only the adapters, in the format of the library PEFT; collective.

    Adapters with names get a folder each inside `target`, which appears only when it is complete;
    an existing `target` is replaced.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for adapter in policy.adapters.names:
        tensors = found.setdefault(adapter, {})
        with policy.adapters.active(adapter):
            for name, weight in adapter_tensors(policy, policy.dtype):
                if policy.ranks.is_main:
                    # Fused matrices share their first factor; a file holds no tensor twice.
                    tensors[name] = weight.clone()
    disk = DiskWork(target.parent, policy.ranks)

    def write() -> None:
        if not policy.ranks.is_main:
            return
        partial = target.with_name(target.name + ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        for adapter, tensors in found.items():
            _write_adapter(tensors, config, partial / adapter, disk.moved)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)

    disk.together(write)


def _targets(config: Config, tensors: Collection[str]) -> list[str] | str:
    """Returns the names of the matrices with adapters, as PEFT looks for them.

    With vision it is a pattern of whole names: the tower's matrices may have the decoder's names.
    """
    names = [part for name in config.lora.modules for part in FUSED[name]]
    others = [*LATENT.values(), *DELTA.values()]
    names += [part for parts in others for part in parts if part not in names]
    found = [name for name in names if any(f".{name}.lora_" in each for each in tensors)]
    if any(".language_model." in name for name in tensors):
        return rf".*\.language_model\..*\.({'|'.join(found)})"
    return found


def _write_adapter(
    tensors: dict[str, Tensor], config: Config, folder: Path, moved: Callable[[int], None]
) -> None:
    folder.mkdir(parents=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors, moved)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model.path),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "bias": "none",
        "inference_mode": True,
        "target_modules": _targets(config, tensors),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
