"""What keeps an engine from starting on this machine, found before anything is loaded."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping

from slipstream.client.placement import uses_gpus
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config, RolloutServerSection
from slipstream.protocol.settings.model_sizes import read_model_sizes

# What decides about vLLM's cache in place of our setting.
CACHE_ARGUMENTS = {"kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
# torch.compile does nothing where this is set to anything but these.
DYNAMO_SWITCH = "TORCHDYNAMO_DISABLE"
_NOT_SET = ("", "0")
# torch compiles code for CPUs with it where CXX names no other compiler.
CPU_COMPILER = "g++"


def check_cache(config: Config) -> None:
    """ConfigError when the KV cache of an engine on CPUs has no room for one episode.

    vLLM would say so when it has loaded the model, and name no setting of ours.
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


def check_compiler(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """ConfigError when the engine is to compile its model, and `environ` does not let it."""
    problem = compiler_problem(config.rollout_server, environ, on_cpu=not uses_gpus())
    if problem:
        raise ConfigError(problem)


def compiler_problem(
    server: RolloutServerSection, environ: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Why torch.compile cannot work with the variables of `environ`; empty: it can, or need not."""
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


def describe_engine(server: RolloutServerSection, *, on_cpu: bool) -> str:
    """How an engine that starts here runs its model, in one line."""
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
