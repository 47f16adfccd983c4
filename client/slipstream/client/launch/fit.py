"""Checks that a configuration fits the engines, GPUs and memory of this machine."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.client.launch.findings import Finding, Scene, advice, ok, problem
from slipstream.client.launch.machine import GIB
from slipstream.client.launch.placement import fit_here, uses_gpus
from slipstream.client.run_folder import nearest_folder
from slipstream.core.configuration.batch_bytes import BatchBytes
from slipstream.core.configuration.node_plan import MEAN_SHARE
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import ConfigError
from slipstream.core.extension import num_parameters_beside_model
from slipstream.core.machine.description import free_memory
from slipstream.core.machine.gpus import find_gpu, list_gpus
from slipstream.core.models.model_files import loaded_tensors, missing_weights
from slipstream.core.models.model_rules import cpu_cache_bytes, cpu_engine_problems
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import RolloutServerSection

# torch.compile does nothing where this variable has any value but those of `_NOT_SET`.
DYNAMO_SWITCH = "TORCHDYNAMO_DISABLE"
_NOT_SET = ("", "0")
# The compiler with which torch compiles code for CPUs where CXX names no other.
CPU_COMPILER = "g++"


def check_engine(scene: Scene) -> str:
    """Checks that an engine could start on this machine; returns how it would run its model."""
    server = scene.config.rollout_server
    on_cpu = not uses_gpus()
    if why := compiler_problem(server, os.environ, on_cpu=on_cpu):
        raise ConfigError(why)
    if scene.has_model and not scene.dry_run:
        # A dry run lists such problems after its plan.
        for lack in processor_problems(scene.config):
            raise ConfigError(lack)
    return describe_engine(server, on_cpu=on_cpu)


def processor_problems(config: Config) -> tuple[str, ...]:
    """Returns a line for each setting that needs engines on GPUs, or () if engines run on GPUs."""
    return () if uses_gpus() else tuple(cpu_engine_problems(config))


def compiler_problem(
    server: RolloutServerSection, environ: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Returns why torch.compile cannot work with `environ`, or "" if it can or is not used."""
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
    """Returns, in one line, how an engine that starts here runs its model."""
    where = "a CPU" if on_cpu else "GPUs"
    if server.is_eager(on_cpu=on_cpu):
        how = "eagerly"
        value = "true"
    else:
        how = "with torch.compile" if on_cpu else "with torch.compile and CUDA graphs"
        value = "false"
    by_default = " by default" if server.enforce_eager is None else ""
    return (
        f"vLLM runs the model {how}: rollout_server.enforce_eager is {value}{by_default} on {where}"
    )


# Room for settings, logs and the first steps of the journal, and for more.
LEAST_DISK_BYTES = 64 << 20
MIN_DISK_GIB = 5
# GiB that libraries take without a model: in a trainer rank, and in all processes of an engine.
RANK_GIB = 0.6
ENGINE_GIB = 1.5
# Bytes for a parameter: its gradient, the optimizer's two moments, and the fp32 master of a 16-bit
# weight.
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
MASTER_BYTES = 4
# Share of a GPU that activations and logits need.
ACTIVATION_SHARE = 0.15
# Largest part of an engine's share for weights: beyond it the KV cache is too small to be useful.
WEIGHT_SHARE = 0.7
MORE_RANKS = (
    "raise learner.parallel.tp, pp or, for experts, ep, or learner.world_size, or set "
    "learner.offload.optimizer"
)
MORE_OF_SHARED = (
    ", lower rollout_server.gpu_memory_utilization, or let engines give their memory back in each "
    'step by controller.turns = "sleep"'
)


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs, by its settings and the headers of the model's files."""

    parameters: int
    # Weights, gradients and optimizer state of a trainer rank, without activations.
    rank_bytes: float
    # Weights of an engine worker.
    worker_bytes: float
    # A checkpoint: every parameter once, with its optimizer state; and the exported model.
    saved_bytes: float
    exported_bytes: float
    # Weights of a trainer rank.
    weight_bytes: float


def needs_of(config: Config) -> Needs | None:
    """Returns what the run needs, or None if the model's files are missing, faulty or empty."""
    if missing_weights(config.model.path, "model.path"):
        return None
    try:
        tensors = [(name, math.prod(shape)) for name, shape in loaded_tensors(config)]
    except ConfigError:
        # The check of the model has reported this.
        return None
    parameters = sum(size for _, size in tensors)
    if not parameters:
        return None
    experts = sum(size for name, size in tensors if ".experts." in name)
    learner = config.learner
    parallel = config.learner.parallel
    adapts = bool(config.lora.rank)
    weight = 4 if config.model.dtype == "float32" else 2
    state = MOMENT_BYTES + (MASTER_BYTES if weight == 2 else 0)
    weight_bytes = 0.0
    rank_bytes = 0.0
    for number, split in (
        (parameters - experts, parallel.tp * parallel.pp),
        (experts, parallel.ep * (parallel.etp or parallel.tp) * parallel.pp),
    ):
        replicas = learner.world_size / split if learner.use_distributed_optimizer else 1
        trained = GRADIENT_BYTES + (0 if learner.offload.optimizer else state / replicas)
        weight_bytes += number / split * weight
        # Adapters are small next to the weights, which then have neither gradients nor moments.
        rank_bytes += number / split * (weight + (0 if adapts else trained))
    # The distributed optimizer's own float32 weights are saved next to the model's.
    has_master = weight == 2 or learner.use_distributed_optimizer
    saved = weight + (0 if adapts else MOMENT_BYTES + MASTER_BYTES * has_master)
    if config.algorithm.reads_versions and not adapts:
        # Tokens of these versions may be trained after a restart.
        saved += weight * config.algorithm.max_staleness
    beside = num_parameters_beside_model(config)
    # Every rank has these whole, in float32.
    in_float32 = MASTER_BYTES + MOMENT_BYTES
    rank_bytes += beside * (in_float32 + GRADIENT_BYTES)
    on_workers = (parameters + beside) * weight
    return Needs(
        parameters=parameters,
        rank_bytes=rank_bytes,
        worker_bytes=on_workers / config.rollout_server.tensor_parallel_size,
        saved_bytes=parameters * saved + beside * in_float32,
        exported_bytes=parameters * weight,
        weight_bytes=weight_bytes,
    )


def check_fit(scene: Scene) -> Iterator[Finding]:
    """Yields findings on placement, transport and memory of what starts on this machine."""
    config = scene.config
    share = scene.share
    needs = needs_of(scene.config)
    if needs is not None:
        other_memory = " and ".join(["activations", *role_settings(config)])
        seen = f"{needs.parameters / 1e6:,.1f} M parameters: {needs.rank_bytes / 1e6:,.1f} MB"
        yield ok(f"{seen} for each rank, without {other_memory}", area="learner memory")
    try:
        config, placement, transport = fit_here(config, share)
    except ConfigError as error:
        yield problem(str(error), "ask for more GPUs, or name by --role what starts here")
        return
    yield ok("; ".join(placement.describe(share.ranks)))
    if transport:
        yield ok(f"weights travel by {transport}", area="transport")
    if needs is None:
        return
    if not placement.learner:
        if not placement.servers:
            workers = config.rollout_server.tensor_parallel_size
            ranks = len(share.ranks)
            engine = workers * (cpu_cache_bytes(config) + needs.worker_bytes) / GIB + ENGINE_GIB
            needed = ranks * (needs.rank_bytes / GIB + RANK_GIB) + share.servers * engine
            free = free_memory()[0] / GIB
            seen = f"about {needed:.1f} GiB (trainer ranks: {ranks}, "
            seen += f"rollout servers: {share.servers})"
            remedy = "lower sampling.max_episode_tokens, rollout_server.count or "
            remedy += "learner.world_size, or take a smaller model"
            lacking = advice(f"{seen}, {free:.1f} GiB are free", remedy, area="main memory")
            yield ok(seen, area="main memory") if needed <= free else lacking
        return
    gpus = list_gpus()
    learner_gpus = [find_gpu(name, gpus) for name in placement.learner]
    gpu_bytes = [gpu.memory_bytes for gpu in learner_gpus if gpu is not None]
    if not gpu_bytes:
        return
    room = min(gpu_bytes) * (1 - placement.engines_share)
    seen = f"{needs.rank_bytes / GIB:.1f} of {room / GIB:.1f} GiB for a trainer rank"
    if needs.rank_bytes > room:
        remedy = f"{MORE_RANKS}{MORE_OF_SHARED if placement.engines_share else ''}"
        yield problem(seen, remedy, area="GPU memory")
    elif needs.rank_bytes > (1 - ACTIVATION_SHARE) * room:
        seen += ": too little is left for activations"
        yield advice(seen, "lower learner.micro_batch_tokens", area="GPU memory")
    else:
        yield ok(seen, area="GPU memory")
    engine = min(gpu_bytes) * placement.least_memory(config)
    area = "engine memory"
    seen = f"{needs.worker_bytes / GIB:.1f} of {engine / GIB:.1f} GiB for an engine's weights"
    remedy = (
        "raise rollout_server.tensor_parallel_size or gpu_memory_utilization: the KV cache has "
        "what is left"
    )
    too_much = needs.worker_bytes > WEIGHT_SHARE * engine
    yield problem(seen, remedy, area=area) if too_much else ok(seen, area=area)


def check_batches(scene: Scene) -> Finding | None:
    """Checks that the ranks of this machine can keep batches whose episodes have a usual length."""
    config = scene.stated
    if config is None or not (config.model.path / "config.json").is_file():
        # The check of the model tells what is missing.
        return None
    batch_bytes = BatchBytes.of(config, read_model_sizes(config.model.path))
    num_ranks = len(scene.share.ranks)
    expected_bytes = MEAN_SHARE * num_ranks * batch_bytes.rank
    _, memory = free_memory()
    seen = (
        f"trainer ranks here: {num_ranks}; they keep {expected_bytes / GIB:,.1f} GiB of a batch "
        f"whose episodes have a third of their {batch_bytes.tokens_per_episode:,} tokens"
    )
    if expected_bytes <= memory:
        return ok(seen)
    remedy = "lower algorithm.groups_per_step, or spread the ranks over more machines"
    if batch_bytes.experts_per_token:
        remedy += ', or set algorithm.router_replay = "off"'
    return problem(f"{seen}, and the machine has {memory / GIB:,.1f} GiB", remedy)


def check_disk(scene: Scene) -> Finding:
    """Checks the room for the run's checkpoints and its final export, in `run.dir`."""
    config = scene.stated
    usual = 0.0
    least_bytes = float(LEAST_DISK_BYTES)
    run_dir = Path("runs") if config is None else config.run.dir
    place, fault = nearest_folder(run_dir)
    if fault:
        seen = f"run.dir is {run_dir}, and {place} cannot be written ({fault})"
        return problem(seen, "set run.dir to a folder of yours")
    free = shutil.disk_usage(place).free
    seen = f"{free / GIB:.2f} GiB are free for {run_dir}"
    if config is not None and (needs := needs_of(config)) is not None:
        final = needs.exported_bytes * config.learner.export_final
        once = needs.saved_bytes if config.checkpoint.every_steps else 0.0
        # A new checkpoint is complete before an old one is removed.
        usual = (config.checkpoint.keep_last + 1) * once + final
        if config.checkpoint.export_every:
            usual += (config.checkpoint.keep_exports + 1) * needs.exported_bytes
        least_bytes = max(least_bytes, once, final)
    if usual:
        seen += f"; checkpoints take {usual / GIB:.2f} GiB"
    if free < least_bytes:
        seen += f"; at least {least_bytes / GIB:.2f} GiB must be free"
        return problem(seen, "make room, or set run.dir to a folder on another disk")
    if free < max(usual, MIN_DISK_GIB * GIB):
        return advice(seen, "checkpoints and the journal grow: set run.dir elsewhere")
    return ok(seen)
