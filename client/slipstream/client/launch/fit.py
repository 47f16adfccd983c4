"""Checks that a configuration fits the engines, GPUs and memory of this machine."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.client.launch.machine import GIB
from slipstream.client.launch.placement import Placement, fit_here, uses_gpus
from slipstream.client.launch.scene import Finding, Scene, advice, ok, problem
from slipstream.client.run_folder import nearest_folder
from slipstream.core.configuration.automatic import ON_GPUS
from slipstream.core.configuration.batch_bytes import BatchBytes, shown_bytes
from slipstream.core.configuration.batch_costs import BatchCosts
from slipstream.core.configuration.node_plan import MEAN_SHARE
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import ConfigError
from slipstream.core.extension import num_parameters_beside_model
from slipstream.core.machine.description import free_memory
from slipstream.core.machine.gpus import Gpu, find_gpu, list_gpus
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
# Bytes of a parameter in an engine with `rollout_server.quantization`, without its scales.
QUANTIZED_BYTES = 1
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
    # Weights, gradients and optimizer state of a trainer rank, and its models besides the policy,
    # without activations.
    rank_bytes: float
    # Weights of an engine worker.
    worker_bytes: float
    # A checkpoint: every parameter once, with its optimizer state; and the exported model.
    saved_bytes: float
    exported_bytes: float
    # Weights of a trainer rank.
    weight_bytes: float
    # The part of `rank_bytes` of each model besides the policy, by the name of its table.
    bytes_by_role: Mapping[str, float] = field(default_factory=dict)

    def with_roles(self, bytes_by_role: Mapping[str, float]) -> Needs:
        """Returns the needs with those of other models on the same ranks."""
        rank_bytes = self.rank_bytes + sum(bytes_by_role.values())
        return replace(self, rank_bytes=rank_bytes, bytes_by_role=bytes_by_role)


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
    try:
        bytes_by_role = _bytes_by_role(config)
    except ConfigError:
        return None
    return _needs(config, parameters, experts).with_roles(bytes_by_role)


def estimated_needs(config: Config) -> Needs:
    """Returns about what the run needs, by config.json alone; ConfigError without one."""
    return _estimated(config).with_roles(_bytes_by_role(config))


def _estimated(config: Config) -> Needs:
    """Returns about what the policy needs, or a model in its place, by config.json alone."""
    sizes = read_model_sizes(config.model.path)
    return _needs(config, sizes.parameters, sizes.expert_parameters)


def _bytes_by_role(config: Config) -> dict[str, float]:
    """Returns about what each model besides the policy needs of a trainer rank.

    Raises ConfigError for a folder without a config.json.
    """
    bytes_by_role: dict[str, float] = {}
    for name, settings in role_settings(config).items():
        needs = _estimated(settings)
        # References are frozen: they have weights alone.
        bytes_by_role[name] = needs.rank_bytes if name == "critic" else needs.weight_bytes
    return bytes_by_role


def _needs(config: Config, parameters: int, experts: int) -> Needs:
    """Returns the needs of a model of so many parameters, of which `experts` are of experts."""
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
    quantizes = config.rollout_server.quantization != "off"
    on_workers = (parameters + beside) * (QUANTIZED_BYTES if quantizes else weight)
    return Needs(
        parameters=parameters,
        rank_bytes=rank_bytes,
        worker_bytes=on_workers * worker_share(config),
        saved_bytes=parameters * saved + beside * in_float32,
        exported_bytes=parameters * weight,
        weight_bytes=weight_bytes,
    )


def worker_share(config: Config) -> float:
    """Returns the largest share of the weights that a worker of an engine has."""
    server = config.rollout_server
    stages = server.pipeline_parallel_size
    share = read_model_sizes(config.model.path).stage_share(stages) if stages > 1 else 1.0
    return share / server.tensor_parallel_size


def check_fit(scene: Scene) -> Iterator[Finding]:
    """Yields findings on placement, transport and memory of what starts on this machine."""
    config = scene.config
    share = scene.share
    needs = needs_of(scene.config)
    if needs is not None:
        seen = f"{needs.parameters / 1e6:,.1f} M parameters: {needs.rank_bytes / 1e6:,.1f} MB"
        roles = [
            f"{num_bytes / 1e6:,.1f} for {name}" for name, num_bytes in needs.bytes_by_role.items()
        ]
        of_roles = f", {' and '.join(roles)} among them" if roles else ""
        yield ok(
            f"{seen} for each rank{of_roles}, without activations",
            area="learner memory",
        )
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
            workers = config.rollout_server.num_workers
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


def gpu_needs(config: Config) -> str:
    """Returns a line with the GPU memory that ranks and engines need beside activations and cache.

    By config.json alone; "" for a model that is small enough for any GPU, or for CPUs.
    """
    if config.model.dtype == "float32" or read_model_sizes(config.model.path).parameters < ON_GPUS:
        return ""
    needs = estimated_needs(config)
    share = config.rollout_server.gpu_memory_utilization
    workers = config.rollout_server.num_workers
    return (
        f"a trainer rank's GPU needs {shown_bytes(needs.rank_bytes)} without activations; an "
        f"engine worker's {shown_bytes(needs.worker_bytes / share)} without cache: 1 of {workers} "
        f"parts of the weights, at gpu_memory_utilization {share:g}"
    )


def gpu_obstacles(config: Config, placement: Placement) -> tuple[str, ...]:
    """Returns a line for each GPU memory here that cannot hold what is placed there.

    By config.json alone. Activations, logits and cache come on top.
    """
    if not (placement.learner or placement.servers):
        return ()
    needs = estimated_needs(config)
    gpus = list_gpus()
    lines = []
    smallest = _smallest_gpu(placement.learner, gpus)
    room = smallest * (1 - placement.engines_share)
    # Another optimizer than Adam has other state.
    if 0 < room < needs.rank_bytes and not config.learner.optimizer:
        lines.append(
            f"a trainer rank needs {shown_bytes(needs.rank_bytes)} of weights, gradients and "
            f"optimizer state, and has {shown_bytes(room)} of a GPU: {MORE_RANKS}"
        )
    server = config.rollout_server
    smallest = _smallest_gpu([gpu for names in placement.servers for gpu in names], gpus)
    share = placement.least_memory(config)
    if 0 < smallest * share < needs.worker_bytes:
        width = f"rollout_server.tensor_parallel_size {server.tensor_parallel_size}"
        if server.pipeline_parallel_size > 1:
            width += f" * pipeline_parallel_size {server.pipeline_parallel_size}"
        lines.append(
            f"weights of {shown_bytes(needs.worker_bytes / worker_share(config))} over {width} are "
            f"{shown_bytes(needs.worker_bytes)} for each worker, which has {share:g} of a GPU of "
            f"{shown_bytes(smallest)}: an engine runs on one host, so raise tensor_parallel_size "
            "or pipeline_parallel_size up to its GPUs, take larger ones, or set "
            "rollout_server.quantization"
        )
    return tuple(lines)


def _smallest_gpu(names: Iterable[str], gpus: Sequence[Gpu]) -> int:
    """Returns the bytes of the smallest of the named GPUs; 0 if none of them is known."""
    sizes = [gpu.memory_bytes for name in names if (gpu := find_gpu(name, gpus)) is not None]
    return min(sizes, default=0)


def check_batches(scene: Scene) -> Finding | None:
    """Checks that what starts on this machine can keep batches of episodes of a usual length."""
    config = scene.stated
    if config is None or not (config.model.path / "config.json").is_file():
        # The check of the model tells what is missing.
        return None
    if config.controller.client_loop:
        # A client's steps have the sizes that it gives them.
        return None
    sizes = read_model_sizes(config.model.path)
    batch_bytes = BatchBytes.of(config, sizes)
    num_ranks = len(scene.share.ranks)
    expected_bytes = MEAN_SHARE * num_ranks * batch_bytes.rank
    who = f"trainer ranks here: {num_ranks}; they keep"
    if scene.share.has_controller:
        costs = BatchCosts.of(config, sizes, batch_bytes)
        expected_bytes += MEAN_SHARE * costs.controller_bytes
        who = f"trainer ranks here: {num_ranks}; they and the controller keep"
    _, memory = free_memory()
    seen = (
        f"{who} {expected_bytes / GIB:,.1f} GiB of a batch "
        f"whose episodes have a third of their {batch_bytes.tokens_per_episode:,} tokens"
    )
    if expected_bytes <= memory:
        return ok(seen)
    remedy = "lower algorithm.groups_per_step, or spread the ranks over more machines"
    if batch_bytes.experts_per_token:
        remedy += ', or set algorithm.router_replay = "off"'
    return problem(f"{seen}, and the machine has {memory / GIB:,.1f} GiB", remedy)


def journal_warning(config: Config) -> str:
    """Returns why the journal may fill the disk of `run.dir` before the run ends, or ""."""
    if config.controller.client_loop or not (config.model.path / "config.json").is_file():
        return ""
    batch_bytes = BatchBytes.of(config, read_model_sizes(config.model.path))
    place, fault = nearest_folder(config.run.dir)
    free = 0 if fault else shutil.disk_usage(place).free
    expected_bytes = MEAN_SHARE * batch_bytes.journal
    if not 0 < free < expected_bytes:
        return ""
    steps = math.floor(free / (MEAN_SHARE * batch_bytes.batch))
    remedy = "set run.dir to a folder on another disk"
    if config.checkpoint.keep_batches:
        remedy = f"set checkpoint.keep_batches = false, or {remedy.removeprefix('set ')}"
    return (
        f"batches of episodes of a usual length fill the {shown_bytes(free)} that are free for "
        f"{config.run.dir} after {steps:,} of {config.run.steps:,} steps: {remedy}"
    )


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
    if config is not None and (warning := journal_warning(config)):
        cause, _, remedy = warning.partition(": ")
        return advice(f"{seen}; {cause}", remedy)
    return ok(seen)
