"""One update through vLLM's own loader, and the copy plan that is recorded from it.

Consumes: buckets. Produces: a loaded model, and its copy plan or a log line on why it has none.
Waits for: each bucket. Unblocked by: the bucket, or its deadline.

Some layers of vLLM transform their weights after loading, so that copies alone do not suffice.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.models.families import FAMILIES
from slipstream.protocol.weights.buckets import Bucket
from slipstream.rollout_server.weights.bucket_receiver import Update
from slipstream.rollout_server.weights.copy_plan import (
    CopyPlan,
    NotCopied,
    Parameters,
    PlanCheck,
    PlannedCopies,
    cut,
    record,
)
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import reload
from vllm.model_executor.models.utils import is_pp_missing_parameter

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


def load(
    model: torch.nn.Module,
    model_config: ModelConfig,
    update: Update,
    plan: CopyPlan | None,
    *,
    num_weights: int,
    keep_adapters: Callable[[int, torch.Tensor], None],
) -> PlannedCopies | None:
    """Reloads `model` through vLLM's loader; returns the plan's replay if the plan agrees.

    Receives all buckets of `update`, each within its deadline, and notes their digests and the time
    that they took. The first `num_weights` hold weights; `keep_adapters` takes the others. Raises
    WeightSyncError if a bucket misses its deadline or parameters are left out. After an error
    vLLM's reload must still be finalised, and the model needs a whole new update.
    """
    update.started_s = time.perf_counter()
    parameters = initialized(model)
    # Parameters that layers compute from others after loading, such as scales, are never sent.
    awaited = parameters.keys() & dict(model.named_parameters()).keys()
    missing = set(map(loaded_name, awaited))
    check = None if plan is None else PlanCheck(plan, parameters)
    receiver = update.receiver
    buckets = update.incoming.buckets
    assert receiver is not None, "an update is loaded when it is ready"
    waiting_s = time.perf_counter()
    for place, buffer in enumerate(receiver.receive(update.incoming)):
        update.receive_s += time.perf_counter() - waiting_s
        if place >= num_weights:
            keep_adapters(place, buffer)
        else:
            # The layerwise reload keeps references into the buffer until a layer is complete.
            loaded = load_tensors(model, cut(buffer, buckets[place]))
            # Some models do not say what they loaded.
            missing -= missing if loaded is None else set(map(loaded_name, loaded))
            if check is not None:
                check.add(place, buffer)
        # The last one is not held while layers are finalised.
        del buffer
        waiting_s = time.perf_counter()
    update.digests = receiver.digests()
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise WeightSyncError(f"{len(missing)} parameters were left out: {names}")
    reload.finalize_layerwise_reload(model, model_config)
    on_cpu = next(iter(parameters.values())).device.type == "cpu"
    for module in model.modules():
        if on_cpu and isinstance(module, RoutedExperts):
            # vLLM packs the experts' matrices when it makes their kernel, and at no later load. It
            # would compute with plain matrices as if they were packed (0.32.0).
            kernel = module.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(module)
    if plan is None or check is None:
        return None
    different = check.failure()
    after = dict(model.named_parameters())
    moved = [name for name, parameter in parameters.items() if after.get(name) is not parameter]
    if different is not None or moved:
        log_loader(f"{different or moved[0]} is not a copy of a bucket's data")
        return None
    copies = sum(map(len, plan))
    log.info("later weights are copied: a plan of %d copies agrees with the loader", copies)
    return PlannedCopies(plan, after)


def initialized(model: torch.nn.Module) -> Parameters:
    """Prepares every layer for its new weights; returns the parameters that it had before."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            # vLLM asks each loader for its name, which MiniMax M2's norms do not have (0.32.0).
            loader.__name__ = "weight_loader"  # type: ignore[attr-defined]
    reload.initialize_layerwise_reload(model)
    return parameters


def check_layers(model: torch.nn.Module) -> None:
    """Raises NotCopied if a layer transforms its weights, or computes other tensors from them."""
    for name, module in model.named_modules():
        method = vars(module).get("quant_method")
        if method is not None and type(method) not in PLAIN_METHODS:
            raise NotCopied(f"{name} ({type(module).__name__}) uses {type(method).__name__}")
        if isinstance(module, MLAAttention):
            raise NotCopied(f"{name} ({type(module).__name__}) computes matrices from its weights")
        if isinstance(module, Attention):
            # FlashInfer and b12x compute with a float32 copy of the attention sinks, made after
            # each load, unless the parameter itself is float32 (0.32.0).
            variants = module.impl.get_impl_variants()
            sinks = [vars(variant).get("_sinks_source") for variant in variants]
            if any(sink is not None and sink.dtype != torch.float32 for sink in sinks):
                raise NotCopied(
                    f"{name} ({type(module).__name__}) computes with a copy of its sinks"
                )
        if isinstance(module, RoutedExperts) and next(module.parameters()).device.type == "cpu":
            raise NotCopied(f"{name} ({type(module).__name__}) packs its weights on a CPU")


def loaded_name(parameter: str) -> str:
    """Returns the name that loaders use, without the `base_layer` of an adapter's wrapper."""
    return parameter.replace(".base_layer.", ".")


def repack_kept_linears(model: torch.nn.Module) -> None:
    """Repacks the weights of modules that keep `.weight` next to a prepacked matrix.

    vLLM for CPU packs a tied head at the start. No weight arrives under the head's name later, so
    the head would compute with the old weights for ever (0.32.0).
    """
    for module in model.modules():
        if "cpu_linear" not in vars(module) or "quant_method" not in vars(module):
            continue
        weight = module.weight
        if isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]


def load_tensors(model: torch.nn.Module, tensors: Iterable[Named]) -> set[str] | None:
    """Passes `tensors` to the loader of `model`.

    Returns the names of the loaded parameters, or None if the loader returns None. The loader of
    gpt-oss copies attention sinks, and all experts of a layer at once, into parameters without
    calling the parameters' own loaders. During a reload the parameters have no memory: the copy is
    lost without an error, and the engine keeps its old experts and sinks (0.32.0). So this function
    passes sinks and experts to the parameters' own loaders one by one.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or not family.engine.copies_parameters:
        loaded: set[str] | None = model.load_weights(tensors)  # type: ignore[operator]
        return loaded
    sinks: set[str] = set()

    def one_by_one() -> Iterator[Named]:
        for name, tensor in tensors:
            experts = _EXPERTS.fullmatch(name)
            if experts is not None:
                for expert, expert_tensor in enumerate(tensor):
                    yield f"{experts[1]}{expert}.{_OF_ONE[experts[2]]}", expert_tensor
            elif name.endswith(_SINKS):
                parameter = name.replace(_SINKS, ".attn.sinks")
                if is_pp_missing_parameter(parameter, model):
                    continue
                target = model.get_parameter(parameter)
                ranks = get_tensor_model_parallel_world_size()
                rank_sinks = tensor.chunk(ranks)[get_tensor_model_parallel_rank()]
                target.weight_loader(target, rank_sinks)  # type: ignore[attr-defined]
                sinks.add(parameter)
            else:
                yield name, tensor

    return set(model.load_weights(one_by_one())) | sinks  # type: ignore[operator]


# vLLM's own logger: the engine's processes have no other handler.
log = init_logger(f"vllm.{__name__}")

# Errors of models' loaders when the layers do not look as they did at the start.
_LOADER_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def recorded_plan(
    model: torch.nn.Module,
    buckets: tuple[Bucket, ...],
    device: torch.device,
    vllm_config: VllmConfig,
) -> CopyPlan | None:
    """Returns the copy plan of `buckets`, or None, with the reason in the log, if there is none."""
    try:
        if vllm_config.parallel_config.enable_eplb:
            raise NotCopied("experts change their places while the engine runs")
        check_layers(model)
        # Every model of vLLM has `load_weights`; their base class does not declare it.
        load_weights: Any = model.load_weights
        with set_current_vllm_config(vllm_config):
            return record(load_weights, dict(model.named_parameters()), buckets, device)
    except NotCopied as error:
        log_loader(str(error))
    except _LOADER_ERRORS as error:
        log_loader(f"{type(error).__name__} while its copies were recorded: {error}")
    return None


def log_loader(reason: str) -> None:
    """Logs that vLLM's loader handles every update, and the `reason`."""
    log.warning("weights go through vLLM's loader at every update: %s", reason)
