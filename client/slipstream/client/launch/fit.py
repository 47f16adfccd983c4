"""Checks that a configuration fits the engines, GPUs and memory of this machine."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.client.launch.findings import Finding, Scene, advice, ok, problem
from slipstream.client.launch.machine import GIB
from slipstream.client.launch.placement import Placement, fit_here, uses_gpus
from slipstream.client.launch.share import Share
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import ConfigError
from slipstream.core.machine.gpus import find_gpu, list_gpus
from slipstream.core.machine.memory import free_memory
from slipstream.core.models.model_files import loaded_tensors, missing_weights
from slipstream.core.models.model_rules import cpu_cache_bytes, cpu_engine_problems
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes
from slipstream.core.settings.config import Config, RolloutServerSection
from slipstream.core.settings.sections import KEPT_LOGITS_SHARE, ParallelSection

# torch.compile does nothing where this variable has any value but those of `_NOT_SET`.
DYNAMO_SWITCH = "TORCHDYNAMO_DISABLE"
_NOT_SET = ("", "0")
# The compiler with which torch compiles code for CPUs where CXX names no other.
CPU_COMPILER = "g++"


def check_engine(scene: Scene) -> str:
    """Checks that an engine could start on this machine; returns how it would run its model."""
    server, on_cpu = scene.config.rollout_server, not uses_gpus()
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
        how, value = "eagerly", "true"
    else:
        how = "with torch.compile" if on_cpu else "with torch.compile and CUDA graphs"
        value = "false"
    by_default = " by default" if server.enforce_eager is None else ""
    return (
        f"vLLM runs the model {how}: rollout_server.enforce_eager is {value}{by_default} on {where}"
    )


# Room for settings, logs and the first steps of the journal, and for more.
LEAST_DISK_BYTES, MIN_DISK_GIB = 64 << 20, 5
# GiB that libraries take without a model: in a trainer rank, and in all processes of an engine.
RANK_GIB, ENGINE_GIB = 0.6, 1.5
# Bytes of optimizer state for a parameter: two moments, and the fp32 master of a 16-bit weight.
MOMENT_BYTES = 8
MASTER_BYTES = 4
GRADIENT_BYTES = 4
# Share of a GPU that activations and logits need, where they are not estimated.
ACTIVATION_SHARE = 0.15
# Bytes of a logit, with its gradient, that is kept for the backward pass.
LOGIT_BYTES = 6
# Largest part of an engine's share for weights: beyond it the KV cache is too small to be useful.
WEIGHT_SHARE = 0.7


@dataclass(frozen=True)
class Needs:
    """Bytes that a rank and an engine worker need without activations, and a checkpoint's size."""

    parameters: int
    rank_bytes: float
    worker_bytes: float
    # Bytes of a checkpoint: every parameter once, with its optimizer state.
    saved_bytes: float
    # The part of `saved_bytes` that belongs to experts.
    saved_expert_bytes: float = 0.0
    # Memory of a micro batch in a rank, or None if it is not estimated.
    kept: Kept | None = None


@dataclass(frozen=True)
class Kept:
    """Estimated bytes that a rank stores of a micro batch until its backward pass."""

    # Activations of all layers; with recomputation, of one layer plus the inputs of the others.
    layers: float
    recomputed: float
    # All logits.
    logits: float


def check_fit(scene: Scene) -> Iterator[Finding]:
    """Yields findings on placement, transport and memory of what starts on this machine.

    Where the scene has no parts, that is all that `slipstream run` starts, and GPUs that do not fit
    yield only advice.
    """
    config, needs, ranks = scene.config, needs_of(scene.config), scene.config.learner.world_size
    whole = Share(range(config.learner.ranks_per_node or ranks), config.rollout_server.count)
    share = scene.share if scene.parts else whole
    if needs is not None:
        others = " and ".join(["activations", *role_settings(config)])
        of_rank = f"{short(needs.rank_bytes)}B for each rank, without {others}"
        yield ok(f"{short(needs.parameters)} parameters: {of_rank}", area="learner memory")
    try:
        config, placement, transport = fit_here(config, share)
    except ConfigError as error:
        if scene.parts:
            yield problem(str(error), "ask the scheduler for what the role needs")
        else:
            remedy = "nothing, if learner and rollout servers have machines of their own"
            yield advice(f"`slipstream run` does not fit here: {error}", remedy)
        return
    yield ok("; ".join(placement.describe(share.ranks)))
    if transport:
        yield ok(f"weights travel by {transport}", area="transport")
    if needs is None:
        return
    if placement.learner:
        yield from _memory(config, placement, needs)
        if config.checkpoint.every_steps:
            yield _checkpoint_memory(config, len(share.ranks), needs)
    elif not placement.servers:
        yield _main_memory(config, share, needs)


def needs_of(config: Config) -> Needs | None:
    """Returns the memory and storage that the run needs, by the headers of the model's files.

    Returns None if these files are missing, faulty or without parameters.
    """
    if missing_weights(config.model.path, "model.path"):
        return None
    try:
        parameters, experts = _parameters(config)
    except ConfigError:
        # The check of the model has reported this.
        return None
    if not parameters:
        return None
    learner, parallel = config.learner, config.learner.parallel
    weight_bytes = _weight_bytes(config)
    is_half = weight_bytes == 2
    state = MOMENT_BYTES + (MASTER_BYTES if is_half else 0)
    # The distributed optimizer's own float32 weights are saved next to the model's.
    saved = MOMENT_BYTES + (MASTER_BYTES if is_half or learner.use_distributed_optimizer else 0)
    saved_bytes = weight_bytes + (0 if config.lora.rank else saved)
    rank_bytes = 0.0
    for number, split in (
        (parameters - experts, parallel.tp * parallel.pp),
        (experts, expert_split(parallel) * parallel.pp),
    ):
        replicas = learner.world_size / split if learner.use_distributed_optimizer else 1
        trained = GRADIENT_BYTES + (0 if learner.offload.optimizer else state / replicas)
        # Adapters are small next to the weights, which then have neither gradients nor moments.
        rank_bytes += number / split * (weight_bytes + (0 if config.lora.rank else trained))
    return Needs(
        parameters=parameters,
        rank_bytes=rank_bytes,
        worker_bytes=parameters * weight_bytes / config.rollout_server.tensor_parallel_size,
        saved_bytes=parameters * saved_bytes,
        saved_expert_bytes=experts * saved_bytes,
        kept=estimate_kept(config, read_model_sizes(config.model.path)),
    )


def estimate_kept(config: Config, sizes: ModelSizes) -> Kept | None:
    """Returns an estimate of the bytes that a rank stores of a micro batch, or None without one.

    The estimate covers dense decoders in 16 bits without `recompute_granularity` or
    `cpu_offloading`: a layer stores inputs and outputs of its matrix products. Together with the
    rest of a rank's memory, three estimates without recomputation were within 8 % of the peaks
    measured on an H200 (benchmarks/results/learner.md).
    """
    learner, parallel = config.learner, config.learner.parallel
    is_dense = not (sizes.experts or sizes.latent_size or sizes.linear_heads)
    others = {"recompute_granularity", "cpu_offloading"} & learner.transformer.keys()
    if not is_dense or others or config.model.dtype == "float32":
        return None
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    entering = 2 * sizes.hidden / (parallel.tp if learner.sequence_parallel else 1)
    split = 2 * queries + 2 * keys + 3 * sizes.ffn
    of_layer = 3 * entering + 2 * split / parallel.tp
    # The first stage of a pipeline keeps as many micro batches as there are stages.
    layers, recomputed = sizes.layers * of_layer, of_layer + (sizes.layers - 1) * entering
    if sizes.deep_layers:
        recomputed = layers
    logits = LOGIT_BYTES * sizes.vocab / parallel.tp
    if config.debug.head_dtype == "model":
        logits /= 2
    tokens = learner.micro_batch_tokens
    return Kept(tokens * layers, tokens * recomputed, tokens * logits)


def check_disk(scene: Scene) -> Finding:
    """Checks the room for the run's checkpoints and its final export, in `run.dir`."""
    config, usual, least = scene.stated, 0.0, float(LEAST_DISK_BYTES)
    run_dir = Path("runs") if config is None else config.run.dir
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        # Permissions do not show root that a mount is read-only.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError:
        seen = f"run.dir is {run_dir}, and {place} cannot be written"
        return problem(seen, "set run.dir to a folder of yours")
    free = shutil.disk_usage(place).free
    seen = f"{free / GIB:.2f} GiB are free for {run_dir}"
    if config is not None and (needs := needs_of(config)) is not None:
        final = needs.parameters * _weight_bytes(config) * config.learner.export_final
        once = needs.saved_bytes if config.checkpoint.every_steps else 0.0
        # A new checkpoint is complete before an old one is removed.
        usual, least = (config.checkpoint.keep_last + 1) * once + final, max(least, once, final)
    if usual:
        seen += f"; checkpoints take {usual / GIB:.2f} GiB"
    if free < least:
        return problem(seen, "make room, or set run.dir to a folder on another disk")
    if free < max(usual, MIN_DISK_GIB * GIB):
        return advice(seen, "checkpoints and the journal grow: set run.dir elsewhere")
    return ok(seen)


def _weight_bytes(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def expert_split(parallel: ParallelSection) -> int:
    """Returns over how many ranks of a pipeline stage the experts are sharded."""
    return parallel.ep * (parallel.etp or parallel.tp)


def _main_memory(config: Config, share: Share, needs: Needs) -> Finding:
    workers, area = config.rollout_server.tensor_parallel_size, "main memory"
    engine = workers * (cpu_cache_bytes(config) + needs.worker_bytes) / GIB
    ranks, servers = len(share.ranks), share.servers
    needed = ranks * (needs.rank_bytes / GIB + RANK_GIB) + servers * (engine + ENGINE_GIB)
    free = free_memory()[0] / GIB
    seen = f"about {needed:.1f} GiB (trainer ranks: {ranks}, rollout servers: {servers})"
    if needed <= free:
        return ok(seen, area=area)
    return advice(
        f"{seen}, {free:.1f} GiB are free",
        "lower sampling.max_episode_tokens, rollout_server.count or learner.world_size, or take a "
        "smaller model",
        area=area,
    )


def _checkpoint_memory(config: Config, ranks: int, needs: Needs) -> Finding:
    """Compares the copy of a checkpoint in the main memory of the fullest node with what is free.

    Only the first of the ranks that hold the same parameters copies them into main memory.
    """
    parallel, size = config.learner.parallel, config.learner.world_size
    stages = range(0, size, max(1, size // parallel.pp))
    on_node = Counter[int]()
    for saved, split in (
        (needs.saved_bytes - needs.saved_expert_bytes, parallel.tp),
        (needs.saved_expert_bytes, expert_split(parallel)),
    ):
        for rank in (stage + first for stage in stages for first in range(split)):
            on_node[rank // ranks] += int(saved / (len(stages) * split))
    needed, free, area = max(on_node.values()) / GIB, free_memory()[0] / GIB, "checkpoint memory"
    seen = f"{needed:.1f} GiB of main memory for the copy of a checkpoint, {free:.1f} GiB are free"
    if roles := role_settings(config):
        seen += f", without {' and '.join(roles)}"
    remedy = "spread the learner over more nodes, or set checkpoint.every_steps to 0 and keep the "
    remedy += "model of the end"
    return problem(seen, remedy, area=area) if needed > free else ok(seen, area=area)


def _memory(config: Config, placement: Placement, needs: Needs) -> Iterator[Finding]:
    gpus = list_gpus()
    own = [find_gpu(name, gpus) for name in placement.learner]
    known = [gpu.memory_bytes for gpu in own if gpu is not None]
    if not known:
        return
    share = config.rollout_server.gpu_memory_utilization
    # Engines that sleep leave their memory to the step.
    sleeps = config.controller.turns == "sleep"
    sharing = 0 if sleeps else max(placement.shared.values(), default=0)
    room = min(known) * min(1 - sharing * share, config.learner.gpu_memory_fraction or 1.0)
    seen = f"{needs.rank_bytes / GIB:.1f} of {room / GIB:.1f} GiB for a trainer rank"
    more = ACTIVATION_SHARE * room
    if needs.kept is not None:
        # With more logits than this the backward pass computes them again, a few at a time.
        logits = min(needs.kept.logits, 1.5 * KEPT_LOGITS_SHARE * min(known))
        more = needs.kept.layers + logits
        seen += f", without about {more / GIB:.1f} GiB for the tokens of a micro batch"
        if needs.rank_bytes + more > room:
            more = needs.kept.recomputed + logits
            seen += f", of which recomputed layers leave {more / GIB:.1f} GiB or more"
    if needs.rank_bytes > room:
        remedy = "raise learner.parallel.tp, pp or, for experts, ep, or learner.world_size, or set "
        remedy += "learner.offload.optimizer"
        if sharing:
            remedy += ", lower rollout_server.gpu_memory_utilization, or let engines give their "
            remedy += 'memory back in each step by controller.turns = "sleep"'
        yield problem(seen, remedy, area="GPU memory")
    elif needs.rank_bytes + more > room:
        seen += ": too little is left for activations"
        yield advice(seen, "lower learner.micro_batch_tokens", area="GPU memory")
    else:
        yield ok(seen, area="GPU memory")
    engine, area = min(known) * share, "engine memory"
    seen = f"{needs.worker_bytes / GIB:.1f} of {engine / GIB:.1f} GiB for an engine's weights"
    remedy = (
        "raise rollout_server.tensor_parallel_size or gpu_memory_utilization: the KV cache has "
    )
    remedy += "what is left"
    too_much = needs.worker_bytes > WEIGHT_SHARE * engine
    yield problem(seen, remedy, area=area) if too_much else ok(seen, area=area)


def short(number: float) -> str:
    """Returns `number` as text, shortened with a decimal prefix such as M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} "


def _parameters(config: Config) -> tuple[int, int]:
    total = experts = 0
    for name, shape in loaded_tensors(config):
        elements = math.prod(shape)
        total += elements
        experts += elements if ".experts." in name else 0
    return total, experts
