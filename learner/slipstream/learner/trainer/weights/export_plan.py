"""A plan of an export: which parts of the Hugging Face checkpoint's tensors each rank holds.

Bridge's export runs Python and collectives for every tensor, and sends each tensor to all pipeline
stages. Bridge's mappings say which rows of a tensor a rank holds, and that does not change during a
run: one plan serves all publishes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.policy import Policy
from torch import Tensor

# Endings of the tensors with a row for each token.
EMBEDDING = ".embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY = (EMBEDDING, HEAD)
# Ending of tensors that are float32 in every model: rounding would change the choice of experts.
_EXACT = ".e_score_correction_bias"


class UnknownMapping(Exception):
    """Raised if Bridge maps a parameter in a way that this module does not know."""


def exported_type(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the element type of a tensor in files and transfers, for a model of type `dtype`."""
    return torch.float32 if name.endswith(_EXACT) else dtype


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor.

    `part` is a view of a parameter. The parts of the ranks of `group`, in order, are concatenated
    along `dim`; with `dim` None each rank holds the whole tensor. Rows beyond `shape` are padding.
    Unless `dim` is 1, the elements of `part` are in the tensor's order, whatever the shape of
    `part` is.
    """

    name: str
    part: Tensor
    shape: tuple[int, ...]
    dim: int | None
    group: dist.ProcessGroup
    is_expert: bool

    @property
    def num_parts(self) -> int:
        return dist.get_world_size(self.group) if self.dim is not None else 1


def plan_matrices(policy: Policy, *, merged: bool) -> list[Piece]:
    """Returns pieces of every parameter on this rank, experts last; collective.

    Adapters' products are left out. Raises UnknownMapping for a mapping that this module does not
    know, and, if they are to be `merged`, for a matrix with an adapter: no memory holds their sum.
    """
    from slipstream.learner.trainer.layers.expert_adapters import has_adapters

    pieces: list[Piece] = []
    expected = set(policy.bridge.hf_pretrained.state.source.get_all_keys())
    is_tied = policy.chunks[0].config.share_embeddings_and_output_weights
    for task in _tasks_here(policy):
        if merged and ("to_wrap" in task.param_name or has_adapters(task.megatron_module)):
            raise UnknownMapping(f"{task.param_name} has an adapter")
        weight = _plain(task.param_weight)
        mapping = task.mapping
        for name, part, dim in _parts(task, weight):
            piece = _piece(name, part, dim, weight.shape[1:], mapping)
            if name.endswith(VOCABULARY):
                piece = replace(piece, shape=(policy.vocab_size, *piece.shape[1:]))
            pieces.append(piece)
            if is_tied and name.endswith(EMBEDDING) and HEAD in expected:
                pieces.append(replace(piece, name=HEAD))
    return sorted(pieces, key=lambda piece: piece.is_expert)


def plan_adapters(policy: Policy) -> list[Piece]:
    """Returns pieces of A and B of every adapter on this rank, under PEFT's names; collective.

    B's rows are split and fused like the matrix's rows. A is split by columns if the matrix is,
    else by rows (the adapter's rank). Matrices that Megatron fuses share A, which is returned under
    the name of each. Raises UnknownMapping for a mapping that this module does not know, for
    experts and for a matrix that is whole on every rank.
    """
    from megatron.bridge.peft.lora_layers import LoRALinear

    adapters = {
        id(module.to_wrap): module.adapter
        for chunk in policy.chunks
        for module in chunk.modules()
        if isinstance(module, LoRALinear)
    }
    pieces: list[Piece] = []
    for task in _tasks_here(policy):
        adapter = adapters.get(id(task.megatron_module))
        if adapter is None or not task.param_name.endswith(".weight"):
            continue
        if task.mapping.is_expert:
            raise UnknownMapping(f"{task.param_name} is of several experts")
        first, second = (_plain(layer.weight) for layer in (adapter.linear_in, adapter.linear_out))
        for name, rows, dim in _parts(task, second):
            if dim is None:
                raise UnknownMapping(f"{task.param_name} is whole on every rank")
            lora_a, lora_b = (
                peft_name(name, factor, has_vision=policy.vision is not None)
                for factor in ("lora_A", "lora_B")
            )
            split = 1 if dim == 1 else 0
            pieces.append(_piece(lora_a, first, split, first.shape[1:], task.mapping))
            pieces.append(_piece(lora_b, rows, 0, second.shape[1:], task.mapping))
    return pieces


def _piece(
    name: str, part: Tensor, dim: int | None, columns: torch.Size, mapping: Megatron
) -> Piece:
    """Returns the piece of a tensor whose rows are split, if `dim` is 0, and have `columns`."""
    sizes = [part.numel() // columns.numel(), *columns] if dim == 0 else list(part.shape)
    if dim is not None:
        sizes[dim] *= dist.get_world_size(mapping.tp_group)
    return Piece(name, part, tuple(sizes), dim, mapping.tp_group, mapping.is_expert)


def peft_name(name: str, factor: str, *, has_vision: bool) -> str:
    """Returns PEFT's name, by transformers' modules, of a matrix's lora_A or lora_B."""
    path = name.removesuffix("weight")
    # transformers' module of the decoder has its name in either case.
    if has_vision or path.startswith("language_model."):
        path = f"model.language_model.{path[path.index('layers.') :]}"
    return f"base_model.model.{path}{factor}.weight"


def _tasks_here(policy: Policy) -> list[Megatron]:
    tasks = policy.bridge.get_conversion_tasks(policy.chunks)
    return [task for task in tasks if task is not None and task.param_weight is not None]


def _plain(parameter: Tensor) -> Tensor:
    weight = parameter.detach()
    if type(weight) is not Tensor or not weight.is_contiguous():
        raise UnknownMapping(f"a parameter is a {type(weight).__name__}")
    return weight


def _parts(task: Megatron, weight: Tensor) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yields name, view and `Piece.dim` of each checkpoint tensor that `weight` holds."""
    from megatron.bridge.models.conversion import param_mapping as known

    mapping = task.mapping
    module = task.megatron_module
    kind: type = type(mapping)
    if kind is known.AutoMapping and mapping.permute_dims is None:
        parallelism = mapping._detect_parallelism_type(module)
        kind = {
            "column": known.ColumnParallelMapping,
            "row": known.RowParallelMapping,
            "replicated": known.ReplicatedMapping,
        }[parallelism]
    if kind in (known.DirectMapping, known.ReplicatedMapping):
        yield str(mapping.hf_param), weight, None
    elif kind is known.ColumnParallelMapping:
        yield str(mapping.hf_param), weight, 0
    elif kind is known.RowParallelMapping:
        yield str(mapping.hf_param), weight, None if weight.dim() == 1 else 1
    elif kind is known.GatedMLPMapping:
        gate, up = weight.chunk(2, dim=0)
        yield mapping.hf_param["gate"], gate, 0
        yield mapping.hf_param["up"], up, 0
    elif kind is known.QKVMapping:
        if mapping._tp_mapping._detect_parallelism_type(module) != "column":
            raise UnknownMapping(f"{task.param_name} is fused but not split by rows")
        config = mapping._get_config(module)
        name = task.param_name
        if getattr(config, "attention_output_gate", False):
            raise UnknownMapping(f"{name} holds gates of the attention's output")
        per_group = config.num_attention_heads // config.num_query_groups
        size = config.kv_channels or config.hidden_size // config.num_attention_heads
        if weight.shape[0] % ((per_group + 2) * size):
            raise UnknownMapping(f"{name} splits a group of queries")
        # A query group has its query heads first, then its key, then its value.
        by_head = weight.view(-1, per_group + 2, size, *weight.shape[1:])
        yield mapping.hf_param["q"], by_head[:, :per_group], 0
        yield mapping.hf_param["k"], by_head[:, per_group], 0
        yield mapping.hf_param["v"], by_head[:, per_group + 1], 0
    else:
        raise UnknownMapping(f"{task.param_name} has a {type(mapping).__name__}")
