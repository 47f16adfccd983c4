"""What vLLM is started with: our own settings, and `rollout_server.engine` by vLLM's names."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping

from pydantic import JsonValue
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config
from slipstream.rollout_server.inference.adapter_slot import check_adapted, lora_arguments
from slipstream.rollout_server.inference.chunking_scheduler import CPU_WORKER, scheduler_class
from slipstream.rollout_server.weights.weight_receiver import BACKEND
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_SECTION = "rollout_server.engine"
# A process of its own for each worker, or one worker in the engine's process.
_EXECUTORS = ("mp", "uni")
_WORKER_EXTENSION = "slipstream.rollout_server.weights.worker_extension.WorkerExtension"

_WEIGHTS = "the learner's weights could not be loaded into such an engine"
_ADAPTERS = "set lora.publish"
_OFFLOADED = "layers that are fetched from main memory would stay those of the start"
_REPLICAS = "set rollout_server.count for more engines"
_TOKENS = "prompts and replies are token ids, text is made elsewhere"
_PROCESSED = "the learner needs the log-probabilities of the distribution that was sampled from"
# What must agree with other settings or with our own code: what to do instead, or why.
_OWNED = {
    "model": "set model.path",
    "hf_config_path": "set model.path",
    "dtype": "set model.dtype",
    "seed": "it is drawn anew at each start",
    "max_model_len": "set sampling.max_episode_tokens",
    "max_num_seqs": "set rollout_server.max_episodes",
    "tensor_parallel_size": "set rollout_server.tensor_parallel_size",
    "gpu_memory_utilization": "set rollout_server.gpu_memory_utilization",
    "enforce_eager": "set rollout_server.enforce_eager",
    "enable_prefix_caching": "set rollout_server.enable_prefix_caching",
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "pipeline_parallel_size": "set rollout_server.tensor_parallel_size",
    "nnodes": _REPLICAS,
    "logprobs_mode": _PROCESSED,
    "max_logprobs": "one log-probability is asked for, that of the sampled token",
    "return_sampling_mask": "nothing here reads it",
    "logits_processors": _PROCESSED,
    "generation_config": "set the table sampling",
    "override_generation_config": "set the table sampling",
    "speculative_config": "the scheduler here does not join what drafts add to outputs",
    "spec_method": "the scheduler here does not join what drafts add to outputs",
    "spec_model": "the scheduler here does not join what drafts add to outputs",
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "stream_interval": "replies are handed out in chunks already",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_cpu_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "lora_target_modules": _ADAPTERS,
    "lora_dtype": _ADAPTERS,
    "worker_cls": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "weight_transfer_config": _WEIGHTS,
    "enable_sleep_mode": _WEIGHTS,
    "offload_group_size": _OFFLOADED,
    "offload_num_in_group": _OFFLOADED,
    "offload_prefetch_step": _OFFLOADED,
    "offload_params": _OFFLOADED,
    "scheduler_cls": "it is ours",
    "enable_return_routed_experts": "set algorithm.router_replay",
    "aux_output_config": "set algorithm.router_replay",
    "disable_log_stats": "generated tokens are counted there",
}


def engine_config(config: Config, seed: int) -> VllmConfig:
    """The whole configuration for vLLM; ConfigError, before anything is loaded, when it refuses."""
    values = own_values(config, seed) | passed_through(config.rollout_server.engine)
    overrides = values.get("hf_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{_SECTION}.hf_overrides must be a table, got {overrides!r}")
    if "head_dtype" in overrides:
        raise ConfigError(f"{_SECTION}.hf_overrides.head_dtype is decided by model.head_dtype")
    values["hf_overrides"] = overrides | {"head_dtype": config.model.head_dtype}
    if config.algorithm.router_replay != "off":
        # On CPUs vLLM refuses to return experts; our worker and scheduler do it there.
        on_cpu = current_platform.is_cpu()
        values |= {"worker_cls": CPU_WORKER} if on_cpu else {"enable_return_routed_experts": True}
    try:
        # In the context of offline use a step takes as many tokens of prompts as the GPU likes.
        settings = AsyncEngineArgs(**values).create_engine_config(UsageContext.LLM_CLASS)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"vLLM refuses its settings: {said}") from error
    if config.lora.publishes_adapters:
        check_adapted(settings)
    scheduling = settings.scheduler_config
    scheduling.scheduler_cls = scheduler_class(async_scheduling=bool(scheduling.async_scheduling))
    return settings


def passed_through(table: Mapping[str, JsonValue]) -> dict[str, object]:
    """The values of `rollout_server.engine`.

    ConfigError for a name that vLLM's arguments do not have, with the nearest one, and for one that
    is decided elsewhere, with the reason.
    """
    names = [field.name for field in dataclasses.fields(AsyncEngineArgs) if field.init]
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown key {_SECTION}.{name}{hint}")
        if name in _OWNED:
            raise ConfigError(f"{_SECTION}.{name} cannot be passed through: {_OWNED[name]}")
    executor = table.get("distributed_executor_backend", "mp")
    if executor not in _EXECUTORS:
        raise ConfigError(
            f"{_SECTION}.distributed_executor_backend must be one of {', '.join(_EXECUTORS)}, "
            f"got {executor!r}"
        )
    return dict(table)


def own_values(config: Config, seed: int) -> dict[str, object]:
    """What our own settings say in vLLM's names."""
    settings, sampling = config.rollout_server, config.sampling
    sizes = json.loads((config.model.path / "config.json").read_text())
    longest = sizes.get("max_position_embeddings", math.inf)
    return {
        "model": str(config.model.path),
        "dtype": config.model.dtype,
        "seed": seed,
        # One more than an episode: a probe of full length samples one token.
        "max_model_len": min(sampling.max_episode_tokens + 1, longest),
        "max_num_seqs": settings.max_episodes,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # One worker lives in the engine's process: between two processes vLLM waits by spinning.
        "distributed_executor_backend": (
            UniProcExecutor if settings.tensor_parallel_size == 1 else "mp"
        ),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER_EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        **lora_arguments(config.lora),
    }
