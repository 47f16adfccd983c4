"""The layers of vLLM that change their weights after loading, so that a copy is not enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from slipstream.core.models.registry import FAMILIES
from slipstream.rollout_server.weights.copy_plan import NotCopied
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionImplBase

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)

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


def check_layers(model: torch.nn.Module) -> None:
    """Raises NotCopied when a layer keeps its weights in another form or derives others."""
    for name, module in model.named_modules():
        method = vars(module).get("quant_method")
        if method is not None and type(method) not in (*PLAIN_METHODS, Fp8PtpcOnlineLinearMethod):
            raise NotCopied(f"{name} ({type(module).__name__}) uses {type(method).__name__}")
        if isinstance(module, MLAAttention):
            raise NotCopied(f"{name} ({type(module).__name__}) computes matrices from its weights")
        if isinstance(module, Attention) and _copies_sinks(module.impl):
            raise NotCopied(f"{name} ({type(module).__name__}) computes with a copy of its sinks")
        if isinstance(module, RoutedExperts) and next(module.parameters()).device.type == "cpu":
            raise NotCopied(f"{name} ({type(module).__name__}) packs its weights on a CPU")


def _copies_sinks(backend: AttentionImplBase[Any]) -> bool:
    """Whether vLLM makes a float32 copy of the sinks after each load.

    FlashInfer and b12x compute with such a copy unless the parameter itself is float32 (0.32.0).
    """
    sources = [vars(each).get("_sinks_source") for each in backend.get_impl_variants()]
    return any(sinks is not None and sinks.dtype != torch.float32 for sinks in sources)


def loaded_name(parameter: str) -> str:
    """Returns the name that loaders use: they do not see a layer's room for an adapter."""
    return parameter.replace(".base_layer.", ".")


def repack_kept_linears(model: torch.nn.Module) -> None:
    """Packs again the weights of modules that keep `.weight` beside a prepacked matrix.

    vLLM for CPU packs a tied head at the start. No weight arrives under the head's name later, so
    the head would compute with the old weights for ever (0.32.0).
    """
    for module in model.modules():
        if "cpu_linear" not in vars(module) or "quant_method" not in vars(module):
            continue
        weight = module.weight
        if isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]


def repack_experts(model: torch.nn.Module) -> None:
    """Packs the experts' matrices again.

    vLLM for CPU packs them when it makes their kernel, and at no later load. It would compute with
    plain matrices as if they were packed (0.32.0).
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            kernel = module.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(module)


def load_tensors(model: torch.nn.Module, tensors: Iterable[Named]) -> set[str] | None:
    """Hands `tensors` to the loader of `model`; returns the names that the loader returns.

    The loader of gpt-oss copies sinks, and the experts of a layer together, into parameters without
    their own loaders. During a reload these have no memory: the copy is lost without an error, and
    the engine keeps its old experts and sinks (0.32.0). Here they go to the loaders one by one.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or not family.engine.copies_parameters:
        loaded: set[str] | None = model.load_weights(tensors)  # type: ignore[operator]
        return loaded
    sinks: set[str] = set()
    return set(model.load_weights(_one_by_one(model, tensors, sinks))) | sinks  # type: ignore[operator]


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
            own = tensor.chunk(ranks)[get_tensor_model_parallel_rank()]
            target.weight_loader(target, own)  # type: ignore[attr-defined]
            sinks.add(parameter)
        else:
            yield name, tensor
