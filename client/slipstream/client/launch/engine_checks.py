"""Checks, before anything is loaded, that an engine can start on this machine."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping

from slipstream.client.launch.placement import uses_gpus
from slipstream.core.errors import ConfigError
from slipstream.core.models.cpu_engines import cpu_engine_problems
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config, RolloutServerSection

# Arguments of vLLM that set its cache in place of our setting.
CACHE_ARGUMENTS = {"kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
# torch.compile does nothing where this variable has any value but those of `_NOT_SET`.
DYNAMO_SWITCH = "TORCHDYNAMO_DISABLE"
_NOT_SET = ("", "0")
# vLLM runs models by its older runner where this variable is 0.
RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
# The compiler with which torch compiles code for CPUs where CXX names no other.
CPU_COMPILER = "g++"


def check_cache(config: Config) -> None:
    """Raises ConfigError when the KV cache of an engine on CPUs has no room for one episode.

    vLLM would say so only after loading the model, and name no setting of ours.
    """
    server, longest = config.rollout_server, config.sampling.max_episode_tokens
    if uses_gpus() or CACHE_ARGUMENTS & set(server.engine):
        return
    item_bytes = 4 if config.model.dtype == "float32" else 2
    sizes = read_model_sizes(config.model.path)
    needed = longest * sizes.cache_bytes_per_token(item_bytes, server.tensor_parallel_size)
    if needed > server.kv_cache_gib << 30:
        raise ConfigError(
            f"rollout_server.kv_cache_gib must hold an episode of sampling.max_episode_tokens = "
            f"{longest}, {math.ceil(needed / (1 << 30))} GiB, got {server.kv_cache_gib}"
        )


def check_processor(config: Config) -> None:
    """Raises ConfigError when engines would run on a CPU and vLLM cannot do there what is set."""
    for problem in processor_problems(config):
        raise ConfigError(problem)


def processor_problems(config: Config) -> tuple[str, ...]:
    """Returns one line for each setting that needs engines on GPUs, where they run on a CPU."""
    return () if uses_gpus() else tuple(cpu_engine_problems(config))


def check_variables(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError when `environ` prevents what the settings ask of the engine."""
    for problem_of in (compiler_problem, runner_problem):
        problem = problem_of(config.rollout_server, environ, on_cpu=not uses_gpus())
        if problem:
            raise ConfigError(problem)


def compiler_problem(
    server: RolloutServerSection, environ: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Returns why torch.compile cannot work with `environ`, or "" if it can or need not."""
    if server.is_eager(on_cpu=on_cpu):
        return ""
    value = environ.get(DYNAMO_SWITCH, "")
    if value not in _NOT_SET:
        return (
            f"rollout_server.enforce_eager is false, which needs torch.compile, but "
            f"{DYNAMO_SWITCH}={value} switches that off: unset it, or set "
            "rollout_server.enforce_eager = true"
        )
    compiler = environ.get("CXX", CPU_COMPILER)
    if on_cpu and shutil.which(compiler, path=environ.get("PATH")) is None:
        return (
            f"rollout_server.enforce_eager = false needs a C++ compiler on CPUs, but there is no "
            f"{compiler}: install it, or leave the setting out"
        )
    return ""


def runner_problem(
    server: RolloutServerSection, environ: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Returns why drafts cannot be made with `environ`, or "" if they can or are off."""
    if on_cpu or server.drafts != "shared" or environ.get(RUNNER_SWITCH) != "0":
        return ""
    return (
        f'rollout_server.drafts is "shared", which on GPUs needs the runner that '
        f'{RUNNER_SWITCH}=0 switches off: unset it, or set rollout_server.drafts = "off"'
    )


def describe_engine(server: RolloutServerSection, *, on_cpu: bool) -> str:
    """Returns, in one line, how an engine that starts here runs its model."""
    where = "a CPU" if on_cpu else "GPUs"
    if server.is_eager(on_cpu=on_cpu):
        how, value = "eagerly", "true"
    else:
        how = "with torch.compile" if on_cpu else "with torch.compile and CUDA graphs"
        value = "false"
    by_default = " by default" if server.enforce_eager is None else ""
    return (
        f"vLLM runs the model {how}: rollout_server.enforce_eager is {value}{by_default} on {where}"
    )
