"""Loads new weights of gpt-oss in the form in which vLLM's layerwise reload sees them.

vLLM's own loader copies experts of all a layer's experts together, and sinks, into parameters
without their loaders. During a reload these parameters have no memory: the copy is lost without an
error, and the engine keeps its old experts and sinks (0.32.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

# Names in files -> names that vLLM's loader takes for one expert.
_OF_ONE = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(\w+)")
_SINKS = ".self_attn.sinks"

Named = tuple[str, torch.Tensor]


def load_tensors(model: torch.nn.Module, tensors: Iterable[Named]) -> set[str] | None:
    """Hands `tensors` to the loader of `model`; returns what it says that it loaded."""
    if not isinstance(model, GptOssForCausalLM):
        loaded: set[str] | None = model.load_weights(tensors)  # type: ignore[operator]
        return loaded
    sinks: set[str] = set()
    return set(model.load_weights(_one_by_one(model, tensors, sinks))) | sinks


def _one_by_one(
    model: torch.nn.Module, tensors: Iterable[Named], sinks: set[str]
) -> Iterator[Named]:
    """Yields each expert by itself; loads sinks, and adds their names to `sinks`."""
    for name, tensor in tensors:
        found = _EXPERTS.fullmatch(name)
        if found is not None:
            for expert, own in enumerate(tensor):
                yield f"{found[1]}{expert}.{_OF_ONE[found[2]]}", own
        elif name.endswith(_SINKS):
            parameter = name.replace(_SINKS, ".attn.sinks")
            target = model.get_parameter(parameter)
            ranks = get_tensor_model_parallel_world_size()
            target.weight_loader(target, tensor.chunk(ranks)[get_tensor_model_parallel_rank()])
            sinks.add(parameter)
        else:
            yield name, tensor
