"""The arguments of vLLM for fast decoding, and which of its features an engine leaves out."""

from pathlib import Path

from slipstream.core.settings.config import Config
from slipstream.extensions.fast_decoding.server.prompt_gathering import MOST_STEPS
from slipstream.extensions.fast_decoding.server.steady_decoding import STEADY
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_PACKAGE = "slipstream.extensions.fast_decoding.server"
DECODE_BACKEND = f"{_PACKAGE}.decode_attention.DecodeBackend"
GPU_WORKER = f"{_PACKAGE}.one_pass_sampler.OnePassWorker"
# Longest context, in tokens, of a run that reads the cache with our kernel.
MOST_CONTEXT = 4096
ATTENTION = "attention kernel"
SAMPLER = "one-pass sampler"
CHUNKS = "replies in chunks"
_INTERVAL = "prefill_schedule_interval"
_ON_CPU = "the engine computes on a CPU"
_BITS = "algorithm.agreement = 'bits' needs vLLM's own"
_STAGES = "rollout_server.pipeline_parallel_size is over 1"


def engine_arguments(config: Config, _: Path | None, *, on_cpu: bool) -> dict[str, object]:
    """Returns vLLM's arguments; has vLLM build our attention where `disabled_features` allows."""
    settings = config.rollout_server
    disabled = disabled_features(config, on_cpu=on_cpu)
    values: dict[str, object] = {}
    # Only steps with CUDA graphs cost more with a prompt.
    has_graphs = not on_cpu and not settings.is_eager(on_cpu=on_cpu)
    gathers_prompts = has_graphs and CHUNKS not in disabled
    if gathers_prompts and _INTERVAL not in settings.engine:
        values[_INTERVAL] = MOST_STEPS + 1
    if ATTENTION not in disabled:
        # By its name: its module is for processes that start CUDA.
        register_backend(AttentionBackendEnum.FLASH_ATTN, DECODE_BACKEND)
    if SAMPLER not in disabled:
        values["worker_cls"] = GPU_WORKER
    return values


def disabled_features(config: Config, *, on_cpu: bool) -> dict[str, str]:
    """Returns why an engine with these settings leaves features out, by their names."""
    if config.rollout_server.pipeline_parallel_size > 1:
        return dict.fromkeys((ATTENTION, SAMPLER, STEADY, CHUNKS), _STAGES)
    causes = {
        ATTENTION: _attention_cause(config, on_cpu=on_cpu),
        SAMPLER: _sampler_cause(config, on_cpu=on_cpu),
    }
    return {feature: cause for feature, cause in causes.items() if cause}


def _attention_cause(config: Config, *, on_cpu: bool) -> str:
    """Returns why vLLM's own attention reads the cache in all steps, or "".

    Our kernel was measured on Hopper's GPUs alone. FlashAttention reads long contexts as fast.
    """
    if on_cpu:
        return _ON_CPU
    if config.algorithm.agreement == "bits":
        return _BITS
    for name in ("attention_config", "attention_backend"):
        if name in config.rollout_server.engine:
            return f"rollout_server.engine.{name} names another attention"
    if config.sampling.max_episode_tokens > MOST_CONTEXT:
        return f"sampling.max_episode_tokens is over {MOST_CONTEXT}"
    if not current_platform.is_device_capability_family(90):
        return "the GPU is not of the Hopper family"
    return ""


def _sampler_cause(config: Config, *, on_cpu: bool) -> str:
    """Returns why vLLM's own sampler draws all tokens, or ""."""
    if on_cpu:
        return _ON_CPU
    return _BITS if config.algorithm.agreement == "bits" else ""
