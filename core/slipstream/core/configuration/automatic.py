"""Settings that a run chooses automatically, from its other settings and the model's config.json.

The machine has a part in the choice only where one command starts the whole run: hosts of a run
that are started one by one must choose the same. A stated value always wins. The run's folder keeps
the chosen values, and a resumed run takes them from there.
"""

import contextlib
import copy
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, JsonValue, ValidationError
from slipstream.core.configuration.hub_downloads import bring_files
from slipstream.core.configuration.node_plan import (
    Division,
    ModelSpeed,
    NodeGpus,
    NodePlan,
    divide_gpus,
    plan_node,
    rank_state_bytes,
    rates,
)
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import ConfigError
from slipstream.core.extension import unmet
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.machine.files import read_regular
from slipstream.core.models.model_rules import layout_problems
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes
from slipstream.core.run_folder import CONFIG
from slipstream.core.settings.config import Config
from slipstream.core.settings.table_rules import replay_table_problems, trajectory_problems
from slipstream.core.settings.tables import Tables

# Numbers of parameters from which a model is small, or large, for learning rate and batch.
SMALL = 5e7
LARGE = 1e9
# Episodes of a step, of small models on CPUs or one GPU, and of large ones.
SMALL_BATCH = 128
LARGE_BATCH = 512
# Bounds on the lag to choose from: a larger one feeds the trainer better and learns worse by reply.
STALENESS_BOUNDS = (2, 4)
# Settings that a run chooses for a machine's GPUs; a run that goes on keeps them on any machine.
NODE_CHOICES = (
    "learner.world_size",
    "learner.parallel.tp",
    "rollout_server.count",
    "algorithm.max_staleness",
)
# Sizes of tensor parallelism to choose from.
TENSOR_PARALLEL = (1, 2, 4, 8)
# The choices that change most what a run learns, in this order, and how many of them are told.
MATTERS_MOST = (
    "algorithm.learning_rate",
    "algorithm.groups_per_step",
    "sampling.max_reply_tokens",
    "algorithm.group_size",
    "rollout_server.max_episodes",
    "learner.micro_batch_tokens",
)
MOST_TOLD = 3
# Most tokens of an episode, and episodes of a server, unless more are asked for.
EPISODE_TOKENS = 4096
SERVER_EPISODES = 512
# Bytes of weights on one GPU of an engine: half of the smallest GPU for such work.
WORKER_BYTES = 40e9
# Bytes that such an engine has for weights and KV cache.
ENGINE_BYTES = 70e9
# Tokens of a micro batch times parameters of a layer from which a GPU computes for longer than the
# host needs to launch its kernels, which are twice as many for a mixture; and the smallest and
# largest number of tokens that follow.
LAYER_WORK = 4.6e11
LEAST_PACKED = 8192
MOST_PACKED = 32768
# Parameters from which a model in 16 bits is trained on GPUs.
ON_GPUS = 1e8
MIB = 1 << 20

Hub: TypeAlias = Literal["no", "small", "whole"]
T = TypeVar("T")


def completed(
    table: Mapping[str, JsonValue],
    *,
    hub: Hub = "no",
    apart: bool = False,
    gpus: NodeGpus | None = None,
) -> dict[str, JsonValue]:
    """Returns the settings of a file, completed with settings that a run chooses automatically.

    The names of the chosen settings are under the key `automatic`. For models given by their
    Hugging Face name, `hub` says what is downloaded: nothing ("no"), all but weights ("small") or
    everything ("whole"); `apart` is as in `bring_files`. `gpus` are those of a machine on which one
    command starts the whole run; with two or more of them a new run chooses ranks, servers, batch
    and bound for them. Raises pydantic's ValidationError for an
    invalid section, and ConfigError like `bring_files`.
    """
    settings: dict[str, Any] = copy.deepcopy(dict(table))
    add_names(settings)
    lora = settings.get("lora")
    if isinstance(lora, dict) and lora.get("adapters"):
        lora.setdefault("publish", "adapters")
    tables = Tables.model_validate(settings)
    earlier: dict[str, Any] = {}
    if tables.run.resume != "never":
        # A folder without readable settings has recorded nothing.
        with contextlib.suppress(OSError, ValueError):
            earlier = parse_toml(read_regular(tables.run_dir / CONFIG).decode())
    if hub != "no":
        bring_files(settings, earlier, whole=hub == "whole", apart=apart)
        tables = Tables.model_validate(settings)
    try:
        sizes = read_model_sizes(tables.model.path)
    except ConfigError:
        # The check of the model reports this error later.
        sizes = ModelSizes.of({})
    recorded: dict[str, JsonValue] = {}
    # All that the earlier start chose, or nothing where a part of it is missing.
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        recorded = {
            key: reduce(lambda place, name: place[name], key.split("."), earlier)
            for key in earlier["automatic"]
        }
    if recorded:
        # Settings stated now may conflict with settings that were chosen for other values.
        with contextlib.suppress(ValidationError):
            completed_settings = _filled(settings, tables, sizes, recorded, gpus=None)
            Config.model_validate(completed_settings)
            return completed_settings
    return _filled(
        settings,
        tables,
        sizes,
        {},
        gpus=None if earlier else gpus,
    )


class _AutomaticValue:
    """Chooses a setting's value: the stated one, else the recorded one, else the caller's.

    `settings` are the stated ones and the choices so far, `names` those of the latter.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        tables: Tables,
        recorded: Mapping[str, JsonValue],
    ) -> None:
        self.settings = copy.deepcopy(dict(table))
        self.names: list[str] = []
        self._stated = tables
        self._recorded = recorded

    def __call__(self, key: str, value: T) -> T:
        *parents, name = key.split(".")
        section: BaseModel = attrgetter(".".join(parents))(self._stated)
        if name in section.model_fields_set:
            return cast("T", getattr(section, name))
        choice = self._recorded.get(key, cast("JsonValue", value))
        table = reduce(lambda place, name: place.setdefault(name, {}), parents, self.settings)
        table[name] = choice
        self.names.append(key)
        return cast("T", choice)

    def keep(self, keys: Iterable[str]) -> None:
        """Takes the recorded values of those of `keys` that have one."""
        for key in keys:
            if key in self._recorded:
                self(key, self._recorded[key])

    def applied(self) -> Tables:
        return Tables.model_validate(self.settings)


def _filled(
    table: Mapping[str, Any],
    tables: Tables,
    sizes: ModelSizes,
    recorded: Mapping[str, JsonValue],
    *,
    gpus: NodeGpus | None,
) -> dict[str, Any]:
    """Returns `table` with what a run chooses where it is silent; `recorded` choices stay."""
    choice = _AutomaticValue(table, tables, recorded)
    lengths = _choose_lengths(choice, tables, sizes)
    step = _choose_step(choice, tables, sizes, lengths, gpus=gpus)
    # An earlier release chose the warmup, and its run goes on with it.
    choice.keep(["algorithm.warmup_steps"])
    _choose_learner(choice, tables, sizes, lengths)
    _choose_servers(choice, tables, sizes, lengths, step)
    _choose_queue(choice, sizes, step)
    _choose_weights(choice, tables, sizes)
    if choice.names:
        choice.settings["automatic"] = sorted({*tables.automatic, *choice.names})
    return choice.settings


@dataclass(frozen=True)
class _Lengths:
    """The most tokens of an episode, and of one reply."""

    episode: int
    reply: int


@dataclass(frozen=True)
class _StepChoices:
    """Choices for the step that others follow."""

    # GPUs of an engine, those of its stages apart.
    workers: int
    groups: int
    max_staleness: int


def _model_bytes(tables: Tables, sizes: ModelSizes) -> int:
    return sizes.parameters * (4 if tables.model.dtype == "float32" else 2)


def _stage_bytes(tables: Tables, sizes: ModelSizes) -> float:
    """Returns the bytes of weights of the largest stage of an engine."""
    stages = tables.rollout_server.pipeline_parallel_size
    return _model_bytes(tables, sizes) * sizes.stage_share(stages)


def _is_for_gpus(tables: Tables, sizes: ModelSizes) -> bool:
    return tables.model.dtype != "float32" and sizes.parameters >= ON_GPUS


def _choose_lengths(choice: _AutomaticValue, tables: Tables, sizes: ModelSizes) -> _Lengths:
    context = sizes.max_positions or EPISODE_TOKENS
    set_reply = "max_reply_tokens" in tables.sampling.model_fields_set
    room = tables.sampling.max_reply_tokens * 4 // 3 if set_reply else 0
    longest = choice("sampling.max_episode_tokens", min(context, max(EPISODE_TOKENS, room)))
    reply = choice("sampling.max_reply_tokens", max(1, longest * 3 // 4))
    return _Lengths(longest, reply)


def _choose_step(
    choice: _AutomaticValue,
    tables: Tables,
    sizes: ModelSizes,
    lengths: _Lengths,
    *,
    gpus: NodeGpus | None,
) -> _StepChoices:
    """Chooses the batch of a step, and the GPUs that it is divided among."""
    algorithm = tables.algorithm
    is_large = sizes.parameters >= LARGE
    stage_bytes = _stage_bytes(tables, sizes)
    workers = choice("rollout_server.tensor_parallel_size", _workers(sizes, stage_bytes))
    compares = algorithm.advantage not in ("score", "none")
    group_size = choice("algorithm.group_size", 8 if compares else 1)
    episodes = LARGE_BATCH if is_large else SMALL_BATCH
    choice.keep(NODE_CHOICES)
    if gpus is not None and gpus.count > 1 and _can_plan(tables, sizes):
        plan = _node_plan(tables, sizes, gpus, group_size, workers, lengths.reply)
        if plan.world_size > 1 and not _divides(tables):
            choice("learner.world_size", plan.world_size)
        if plan.tensor_parallel > 1 and not _divides(tables):
            choice("learner.parallel.tp", plan.tensor_parallel)
        if plan.num_servers > 1 and not _divides(tables):
            choice("rollout_server.count", plan.num_servers)
        episodes = plan.episodes_per_step
        choice("algorithm.max_staleness", plan.max_staleness)
    max_staleness = choice.applied().algorithm.max_staleness
    per_mini_batch = max(1, episodes // group_size // algorithm.mini_batches)
    groups = choice("algorithm.groups_per_step", per_mini_batch * algorithm.mini_batches)
    choice("algorithm.learning_rate", _learning_rate(sizes, has_adapters=tables.lora.rank > 0))
    return _StepChoices(workers=workers, groups=groups, max_staleness=max_staleness)


def _learning_rate(sizes: ModelSizes, *, has_adapters: bool) -> float:
    # Adapters learn best at some ten times the rate of all parameters.
    if sizes.parameters >= LARGE:
        return 1e-5 if has_adapters else 1e-6
    if sizes.parameters >= SMALL:
        return 1e-4 if has_adapters else 1e-5
    return 3e-3 if has_adapters else 1e-3


def _choose_learner(
    choice: _AutomaticValue, tables: Tables, sizes: ModelSizes, lengths: _Lengths
) -> None:
    parallel = choice.applied().learner.parallel
    rank_tokens = math.ceil(lengths.episode / parallel.cp)
    packed = max(4096, rank_tokens, min(2 * rank_tokens, 8192))
    if _is_for_gpus(tables, sizes):
        kernels = 2 if sizes.experts else 1
        layer = sizes.layer_parameters / parallel.tp / kernels
        tokens = 1 << math.ceil(math.log2(LAYER_WORK / max(layer, 1.0)))
        packed = max(packed, min(max(tokens, LEAST_PACKED), MOST_PACKED))
    choice("learner.micro_batch_tokens", packed + packed % 2)
    choice("learner.threads", 4 if sizes.parameters >= LARGE else 1)
    # Engines that take the whole GPU in turn need the learner's memory.
    sleeps = tables.controller.turns == "sleep"
    choice("learner.offload.gradients", sleeps)
    choice("learner.offload.optimizer", sleeps)


def _choose_servers(
    choice: _AutomaticValue,
    tables: Tables,
    sizes: ModelSizes,
    lengths: _Lengths,
    step: _StepChoices,
) -> None:
    most_episodes = SERVER_EPISODES // 2
    open_steps = 1
    if _is_for_gpus(tables, sizes):
        # An engine is faster with more episodes, as long as their mean length fits its cache: that
        # of one reply, where an episode may be longer than two of them.
        stages = tables.rollout_server.pipeline_parallel_size
        per_token = sizes.cache_bytes_per_token(2, step.workers, stages=stages)
        mean_tokens = min(lengths.episode / 2, max(1, lengths.reply))
        cache_bytes = ENGINE_BYTES - _stage_bytes(tables, sizes) / step.workers
        fitting = cache_bytes / max(1, per_token * mean_tokens)
        most_episodes = min(SERVER_EPISODES, max(64, int(fitting)))
        open_steps = step.max_staleness + 1
    batched = tables.rollout_server.engine.get("max_num_batched_tokens")
    if isinstance(batched, int):
        most_episodes = min(most_episodes, batched)
    largest_group = _largest_group(choice.applied())
    running = min(most_episodes, max(64, largest_group * step.groups * open_steps))
    choice("rollout_server.max_episodes", max(largest_group, running))


def _choose_queue(choice: _AutomaticValue, sizes: ModelSizes, step: _StepChoices) -> None:
    """Chooses the replay of routing, and a queue that holds the bytes that it adds."""
    largest_group = _largest_group(choice.applied())
    replays = choice("algorithm.router_replay", _replay(choice.applied(), sizes)) != "off"
    routing = sizes.routing_bytes_per_token if replays else 0
    trajectory = choice.applied().trajectory_bytes(routing_bytes_per_token=routing)
    ahead = (step.max_staleness + 1) * step.groups * largest_group * trajectory
    choice("queue.max_bytes", max(256 * MIB, ahead))


def _choose_weights(choice: _AutomaticValue, tables: Tables, sizes: ModelSizes) -> None:
    """Chooses buckets, the deadlines of a publish, and the longest silence of a rank."""
    model_bytes = _model_bytes(tables, sizes)
    power = round(math.log2(max(1.0, model_bytes / 32 / MIB)))
    bucket = choice("weights.bucket_mib", 1 << min(9, max(6, power)))
    bucket_s = min(60.0, min(bucket, model_bytes / MIB) * 10 / 64)
    bucket_s = choice("weights.bucket_deadline_s", round(max(2.0, bucket_s), 1))
    join_s = choice("weights.join_deadline_s", round(min(120.0, 20 + model_bytes / 1e7), 1))
    silence_s = 1800.0 if sizes.parameters >= 1e8 else 600.0
    choice("learner.timeout_s", max(silence_s, 2 * (join_s + bucket_s)))


def _can_plan(tables: Tables, sizes: ModelSizes) -> bool:
    """Whether a run is for GPUs, and the speeds that a plan goes by are those of the run."""
    return not (
        not _is_for_gpus(tables, sizes)
        or sizes.experts
        or tables.controller.client_loop
        or tables.reference is not None
        or tables.critic is not None
    )


def _divides(tables: Tables) -> bool:
    """Whether the settings say how GPUs are divided between the learner and rollout servers."""
    learner = {"world_size", "ranks_per_node", "devices", "parallel"}
    server = {"count", "devices"}
    is_learner_stated = learner & tables.learner.model_fields_set
    return bool(is_learner_stated or server & tables.rollout_server.model_fields_set)


def _node_plan(
    tables: Tables,
    sizes: ModelSizes,
    gpus: NodeGpus,
    group_size: int,
    workers: int,
    longest_reply_tokens: int,
) -> NodePlan:
    """Returns the plan for `gpus`; what the settings state is no choice of the plan's."""
    stages = tables.rollout_server.pipeline_parallel_size
    speed = ModelSpeed.of(
        sizes, workers=workers, stages=stages, longest_reply_tokens=longest_reply_tokens
    )
    division = _division(tables)
    if not _divides(tables):
        division = divide_gpus(
            gpus,
            sizes,
            speed,
            workers=workers * stages,
            tensor_parallel=_tensor_parallel(tables, sizes),
        )
    batches: tuple[int, ...] = (LARGE_BATCH,)
    if "groups_per_step" in tables.algorithm.model_fields_set:
        batches = (tables.algorithm.groups_per_step * group_size,)
    elif sizes.parameters < LARGE:
        batches = (SMALL_BATCH, 2 * SMALL_BATCH)
        batches += (LARGE_BATCH,) * (gpus.count >= 4)
    bounds: tuple[int, ...] = STALENESS_BOUNDS
    if "max_staleness" in tables.algorithm.model_fields_set:
        bounds = (tables.algorithm.max_staleness,)
    return plan_node(
        division=division,
        speed=speed,
        longest_reply_tokens=longest_reply_tokens,
        episodes_per_step=batches,
        max_staleness=bounds,
    )


def _division(tables: Tables) -> Division:
    """Returns how the settings divide GPUs."""
    return Division(
        world_size=tables.learner.world_size,
        tensor_parallel=tables.learner.parallel.tp,
        num_servers=tables.rollout_server.count,
    )


def _tensor_parallel(tables: Tables, sizes: ModelSizes) -> tuple[int, ...]:
    """Returns the sizes of tensor parallelism that model and options allow."""
    allowed = []
    before = {*unmet(tables)}
    for tp in TENSOR_PARALLEL:
        parallel = tables.learner.parallel.model_copy(update={"tp": tp})
        changes = {"parallel": parallel, "world_size": tp}
        learner = tables.learner.model_copy(update=changes)
        changed = tables.model_copy(update={"learner": learner})
        refusals = [*layout_problems(sizes, parallel, learner.transformer)]
        if not refusals and before.issuperset(unmet(changed)):
            allowed.append(tp)
    return tuple(allowed)


def describe_plan(tables: Tables) -> list[str]:
    """Returns a line for each choice of a run for its GPUs, with the reason; [] if it made none."""
    if "algorithm.max_staleness" not in tables.automatic:
        return []
    sizes = read_model_sizes(tables.model.path)
    algorithm = tables.algorithm
    reply_tokens = tables.sampling.max_reply_tokens
    workers = tables.rollout_server.tensor_parallel_size
    stages = tables.rollout_server.pipeline_parallel_size
    speed = ModelSpeed.of(sizes, workers=workers, stages=stages, longest_reply_tokens=reply_tokens)
    division = _division(tables)
    plan = NodePlan(
        world_size=division.world_size,
        num_servers=division.num_servers,
        episodes_per_step=algorithm.groups_per_step * algorithm.group_size,
        max_staleness=algorithm.max_staleness,
        tensor_parallel=division.tensor_parallel,
    )
    lines = []
    if "learner.world_size" in tables.automatic:
        tp = division.tensor_parallel
        state = rank_state_bytes(sizes, division.world_size, tp) / 1e9
        lines.append(
            f"learner.world_size {division.world_size}, tp {tp} and dp "
            f"{division.world_size // tp}: the smallest tp with room for a rank's state, "
            f"{state:,.1f} GB of {sizes.parameters / 1e9:,.1f} billion parameters"
        )
    if not {"learner.world_size", "rollout_server.count"}.isdisjoint(tables.automatic):
        trained, sampled = rates(division, speed)
        with_stages = f", pipeline_parallel_size {stages}" if stages > 1 else ""
        lines.append(
            f"rollout_server.count {division.num_servers}, tensor_parallel_size "
            f"{workers}{with_stages}: the "
            f"division of these GPUs with most tokens; ranks would train {trained:,.0f} and "
            f"servers sample {sampled:,.0f} a second, by the speed of H200s"
        )
    lines.append(
        f"{plan.episodes_per_step} episodes a step and max_staleness {plan.max_staleness}: by the "
        f"speed of H200s, with replies of up to {reply_tokens:,} tokens, the trainer would wait "
        f"for replies for {speed.wait_share(plan, reply_tokens):.0%} of a step"
    )
    return lines


def describe_choices(tables: Tables) -> str:
    """Returns one line with the choices of a run that matter most, or "" if there are none.

    How many others there are is said; the run's settings have them all.
    """
    shown = []
    keys = [key for key in MATTERS_MOST if key in tables.automatic]
    keys = keys or list(tables.automatic)
    for key in keys[:MOST_TOLD]:
        value = attrgetter(key)(tables)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        shown.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {text}")
    if num_more := len(tables.automatic) - len(shown):
        shown.append(f"and {num_more} more, in {tables.run_dir / CONFIG} under automatic")
    return ", ".join(shown)


def add_names(table: dict[str, Any]) -> None:
    """Adds missing names: environments are named by class, the run by model and environments."""
    names: list[str] = []
    for place, end in (("environments", ""), ("evaluations", "-evaluation")):
        sections = table.get(place)
        for section in sections if isinstance(sections, list) else ():
            if isinstance(section, dict):
                class_name = str(section.get("reference")).rpartition(":")[2].lower() or "none"
                name = str(section.setdefault("name", f"{class_name}{end}"))
                names += [name] if place == "environments" else []
    model = table.get("model")
    run = table.setdefault("run", {})
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(run, dict):
        parts = [Path(str(path)).absolute().name, *names]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))
        run.setdefault("name", name.lstrip("._-")[:100] or "run")


def _workers(sizes: ModelSizes, model_bytes: float) -> int:
    """Returns the least size of 1 to 8 that divides the heads and has room, or the largest."""
    groups = max(1, sizes.kv_heads)
    fitting = [
        tp
        for tp in (1, 2, 4, 8)
        if sizes.heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)
    ]
    return next((tp for tp in fitting if model_bytes / tp <= WORKER_BYTES), fitting[-1])


def _replay(tables: Tables, sizes: ModelSizes) -> str:
    """Returns "rollout" for a mixture of experts whose routing can be recorded, else "off"."""
    algorithm = tables.algorithm.model_copy(update={"router_replay": "rollout"})
    replaying = tables.model_copy(update={"algorithm": algorithm})
    # With adapters the reference may be the policy without them, which cannot replay.
    without_adapters = tables.lora.rank > 0 and tables.needs_reference
    if not sizes.experts or without_adapters or any(replay_table_problems(replaying)):
        return "off"
    if "max_bytes" not in tables.queue.model_fields_set:
        # The queue's size follows from the answer.
        queue = tables.queue.model_copy(update={"max_bytes": 1 << 62})
        replaying = replaying.model_copy(update={"queue": queue})
    num_bytes = tables.trajectory_bytes(routing_bytes_per_token=sizes.routing_bytes_per_token)
    problems = trajectory_problems(replaying, num_bytes, group_size=_largest_group(tables))
    return "off" if any(problems) else "rollout"


def _largest_group(tables: Tables) -> int:
    """Returns the size of the largest groups; a faulty table of an option is told later."""
    with contextlib.suppress(ValidationError):
        return group_sizes_of(tables).largest
    return tables.algorithm.group_size
