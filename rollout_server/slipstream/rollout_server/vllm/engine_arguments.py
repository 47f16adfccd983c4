"""Builds vLLM's configuration from the run's settings and from `rollout_server.engine`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slipstream.core.models.registered_kinds  # noqa: F401 - vLLM asks transformers for these kinds
from slipstream.core.errors import ConfigError
from slipstream.core.extension import active, resolve
from slipstream.core.models.families import FAMILIES, family_of
from slipstream.core.models.model_rules import cpu_cache_bytes, cpu_engine_problems
from slipstream.core.models.model_sizes import ModelSizes, read_model_table
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SamplingSection
from slipstream.rollout_server.engine_rules import graph_values, vllm_share, wire_bytes
from slipstream.rollout_server.vllm.adapter_slot import check_adapted, lora_arguments
from slipstream.rollout_server.vllm.engine_scheduler import cpu_worker, scheduler_class
from slipstream.rollout_server.vllm.passed_table import table_problems
from slipstream.rollout_server.vllm.weight_receiver import BACKEND
from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_PACKAGE = "slipstream.rollout_server.vllm"
_WORKER_EXTENSION = f"{_PACKAGE}.weight_receiver.WorkerExtension"


def engine_config(config: Config, seed: int, folder: Path | None = None) -> VllmConfig:
    """Builds vLLM's whole configuration, before a model is loaded.

    Extensions may make files in `folder`, which the engine reads. Raises ConfigError if vLLM
    refuses the configuration.
    """
    passed: dict[str, object] = dict(config.rollout_server.engine)
    for problem in table_problems(config.rollout_server.engine):
        raise ConfigError(problem)
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        for problem in cpu_engine_problems(config):
            raise ConfigError(problem)
    else:
        check_precision(config.rollout_server.quantization)
    graphs = graph_values(config.rollout_server, passed, on_cpu=on_cpu)
    values = own_values(config, seed) | graphs | passed
    extensions = active(config)
    for extension in extensions:
        if extension.engine_arguments:
            values |= resolve(extension.engine_arguments)(config, folder, on_cpu=on_cpu)
    records_experts = config.algorithm.router_replay != "off"
    if on_cpu:
        # vLLM refuses to return these on CPUs; our workers and scheduler do it there.
        worker = cpu_worker(
            records_experts=records_experts,
            records_kept_tokens=bool(values.pop("return_sampling_mask", False)),
        )
        values |= {"worker_cls": worker} if worker else {}
    elif records_experts:
        values["enable_return_routed_experts"] = True
    try:
        # With vLLM's context for offline use, a step takes as many prompt tokens as suit the GPU.
        settings = AsyncEngineArgs(**values).create_engine_config(UsageContext.LLM_CLASS)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"vLLM refuses its settings: {message}") from error
    starts_cuda = family_of(read_model_table(config.model.path)).engine.starts_cuda
    # vLLM's class is imported for it, and the engine could not be forked then.
    if config.lora.publishes_adapters and not starts_cuda:
        check_adapted(settings)
    if on_cpu:
        from slipstream.rollout_server.vllm import cpu

        cpu.repair()
        if settings.speculative_config is not None:
            # vLLM would choose the draft's attention anew.
            settings.speculative_config.attention_backend = settings.attention_config.backend
    scheduling = settings.scheduler_config
    is_async = bool(scheduling.async_scheduling)
    scheduling.scheduler_cls = scheduler_class(
        extensions,
        async_scheduling=is_async,
        num_stages=config.rollout_server.pipeline_parallel_size,
    )
    return settings


def check_precision(quantization: str) -> None:
    """Raises ConfigError if this machine's GPUs cannot compute with `quantization`."""
    if quantization != "off" and not current_platform.supports_fp8():
        raise ConfigError(
            f"rollout_server.quantization = {quantization!r} needs a GPU of compute capability 8.9 "
            "or above; set 'off'"
        )


def own_values(config: Config, seed: int) -> dict[str, object]:
    """Returns the values of the run's own settings under vLLM's names."""
    settings = config.rollout_server
    sampling = config.sampling
    table = read_model_table(config.model.path)
    longest = table.get("max_position_embeddings", math.inf)
    on_cpu = current_platform.is_cpu()
    memory_share = settings.gpu_memory_utilization
    if not on_cpu:
        # The size comes from the driver: a process with a CUDA context could not fork the engine.
        gpu_bytes = current_platform.get_device_total_memory()
        memory_share = vllm_share(config, wire_bytes(config), gpu_bytes)
    return {
        "model": str(config.model.path),
        "dtype": config.model.dtype,
        "hf_overrides": {"head_dtype": "float32"},
        "seed": seed,
        # Room for one token more than an episode: a probe of full length samples one token.
        "max_model_len": min(sampling.max_episode_tokens + 1, longest),
        "max_num_seqs": settings.max_episodes,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        # A single worker runs in the engine's process: between processes vLLM waits by spinning.
        "distributed_executor_backend": UniProcExecutor if settings.num_workers == 1 else "mp",
        "gpu_memory_utilization": memory_share,
        **({"kv_cache_memory_bytes": cpu_cache_bytes(config)} if on_cpu else {}),
        "enforce_eager": settings.is_eager(on_cpu=on_cpu),
        "enable_prefix_caching": settings.caches_prefixes,
        "quantization": None if settings.quantization == "off" else settings.quantization,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER_EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        # On a CPU vLLM's workers keep their memory and only pause.
        "enable_sleep_mode": config.controller.turns == "sleep" and not on_cpu,
        **tower_values(table, sampling),
        **lora_arguments(config.lora, on_cpu=on_cpu),
        # vLLM would choose kernels for AMX, where a CPU has it, which take bfloat16 alone.
        **(
            {"attention_backend": AttentionBackendEnum.CPU_MLA}
            if on_cpu and config.model.dtype == "float32" and table.get("kv_lora_rank")
            else {}
        ),
        # vLLM would round the states of these layers to the model's type after each token.
        **({"mamba_ssm_cache_dtype": "float32"} if ModelSizes.of(table).linear_heads else {}),
    }


def tower_values(table: Mapping[str, Any], sampling: SamplingSection) -> dict[str, object]:
    """Registers our model classes with vLLM, and returns vLLM's arguments for a vision tower.

    Without a tower there are no arguments.
    """
    for name, family in FAMILIES.items():
        # vLLM imports the module by its name, in processes of its own too.
        if module := family.engine.module:
            ModelRegistry.register_model(name, f"{_PACKAGE}.{module}:{name}")
    if family_of(table).vision is None:
        return {}
    if family_of(table).engine.starts_cuda:
        from slipstream.rollout_server.vllm import vision_models

        vision_models.ask_images_of_qwen35()
    # Without any image vLLM would leave the tower out, and its weights could not be published.
    return {
        "limit_mm_per_prompt": {"image": max(1, sampling.max_images)},
        # Profiling would use transformers' processors, whose video half needs torchvision.
        "skip_mm_profiling": True,
        # Pixels come as the trainer has them.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }
