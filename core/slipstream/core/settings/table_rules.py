"""Rules between the tables of a run's settings.

Each function yields one line for each broken rule, with the values and the rule.
"""

import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from slipstream.core.extension import active, installed, resolve, unmet
from slipstream.core.settings.engine_table import engine_problems
from slipstream.core.settings.parallel_rules import table_problems, world_problems
from slipstream.core.settings.role_sections import (
    NOT_EXCHANGED,
    CriticSection,
    in_place_of,
    renamed,
    teacher_setting,
)
from slipstream.core.settings.tables import Tables
from slipstream.v1 import bounds_pb2, trajectory_pb2


def _precision_problems(config: Tables) -> Iterator[str]:
    server = config.rollout_server
    model = config.model
    lora = config.lora
    if server.computes_in_fp8 and not config.algorithm.corrects:
        yield (
            "engines in FP8 sample with other probabilities than the learner's: "
            "algorithm.weight must be token or sequence, or have a band, got 'none'"
        )
    if config.learner.computes_in_fp8:
        yield from _fp8_learner_problems(config)
    if server.quantization == "off":
        return
    start = f"rollout_server.quantization = {server.quantization!r} needs "
    if model.dtype != "bfloat16":
        yield f"{start}model.dtype = 'bfloat16', got {model.dtype!r}"
    if lora.publishes_adapters:
        yield f"{start}lora.publish = 'merged', got {lora.publish!r}"


def _fp8_learner_problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that a learner in FP8 excludes."""
    algorithm = config.algorithm
    learner = config.learner
    if not algorithm.corrects:
        yield (
            "a learner in FP8 computes other probabilities than engines sample with: "
            "algorithm.weight must be token or sequence, or have a band, got 'none'"
        )
    if algorithm.agreement == "bits":
        yield "algorithm.agreement must be 'close' with a learner in FP8, got 'bits'"
    if learner.fp8 == "off":
        return
    start = f"learner.fp8 = {learner.fp8!r} needs "
    for name in ("fp8", "fp8_recipe", "fp8_param"):
        if name in learner.transformer:
            yield f"{start}no learner.transformer.{name}, got {learner.transformer[name]!r}"
    if config.model.dtype != "bfloat16":
        yield f"{start}model.dtype = 'bfloat16', got {config.model.dtype!r}"
    if config.lora.rank:
        yield f"{start}lora.rank = 0, since adapters were not tried in it, got {config.lora.rank}"


def _cut_problems(config: Tables) -> Iterator[str]:
    ratios = config.algorithm.behavior_ratios
    if not ratios or config.replays_sampling:
        return
    readers = " and ".join(ratios)
    remedies = " and ".join(ratios.values())
    for name, (value, neutral) in config.sampling.cuts.items():
        yield (
            f"{name} = {value!r} leaves out tokens that the learner's policy has, so {readers} "
            "would compare unlike probabilities, which biases even tokens of the newest weights: "
            f"set {name} = {neutral!r} (evaluations may have their own), {remedies}, or do without "
            "drafts, images, controller.client_loop and agreement = 'bits', with which no cut is "
            "replayed"
        )


def _engine_problems(config: Tables) -> Iterator[str]:
    url = config.rollout_server.engine_url
    if url is not None and not any(manifest.engine for manifest in active(config)):
        yield (
            f"rollout_server.engine_url = {url!r} needs an extension that samples by a server at "
            "an address, and none is installed"
        )


def _version_problems(config: Tables) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.reads_versions and not config.scores_versions:
        yield (
            f"algorithm.weight = {algorithm.weight!r} needs log-probabilities by the versions that "
            "sampled the tokens, and no installed extension computes them"
        )


def _length_problems(config: Tables) -> Iterator[str]:
    sampling = config.sampling
    if sampling.total_tokens < sampling.max_episode_tokens:
        yield (
            f"sampling.max_total_tokens must be 0 or at least max_episode_tokens, "
            f"got {sampling.max_total_tokens} and {sampling.max_episode_tokens}"
        )
    if (sampling.max_prompt_tokens or 0) >= sampling.max_episode_tokens:
        yield (
            f"sampling.max_prompt_tokens must be below max_episode_tokens, "
            f"got {sampling.max_prompt_tokens} and {sampling.max_episode_tokens}"
        )
    for evaluation in config.evaluations:
        if (evaluation.max_reply_tokens or 1) >= sampling.max_episode_tokens:
            yield (
                f"sampling.max_episode_tokens must leave room for a prompt beside "
                f"max_reply_tokens of evaluation {evaluation.name}, "
                f"got {sampling.max_episode_tokens} and {evaluation.max_reply_tokens}"
            )


def _role_problems(config: Tables) -> Iterator[str]:
    # Sizes that a role's table leaves out are the learner's.
    learner = config.learner
    sampling = config.sampling
    for name, role in config.roles.items():
        role_settings = in_place_of(learner, role)
        for problem in (*world_problems(role_settings), *table_problems(role_settings)):
            yield renamed(problem, name, role)
        room = role_settings.micro_batch_tokens * role_settings.parallel.cp
        if sampling.max_episode_tokens > room:
            yield (
                f"an episode must fit one micro batch of the {name}: sampling.max_episode_tokens "
                f"must be at most learner.micro_batch_tokens * {name}.parallel.cp = {room}, "
                f"got {sampling.max_episode_tokens}"
            )


def _served_problems(config: Tables) -> Iterator[str]:
    reference = config.reference
    kl = config.algorithm.kl
    temperature = config.sampling.temperature
    top_k = reference.top_k if reference is not None else 0
    if kl.uses_top_k and not top_k:
        yield f"algorithm.kl.estimator = {kl.estimator!r} needs reference.top_k >= 1, got 0"
    if top_k and not kl.uses_top_k:
        yield (
            f"reference.top_k must be 0 unless a kl.estimator is forward_top_k or reverse_top_k, "
            f"got {top_k}"
        )
    for setting in reference.servers if reference is not None and temperature != 1.0 else ():
        yield (
            f"{setting} needs sampling.temperature = 1: vLLM gives the log-probabilities of "
            f"prompts at temperature 1, got {temperature:g}"
        )
    for evaluation in config.evaluations:
        if reference is not None and (teacher := reference.teacher_of(evaluation.name or "")):
            yield (
                f"{teacher_setting(teacher)}.environments must be trained, got the evaluation "
                f"{evaluation.name}: evaluations have no teacher"
            )


# The generated stubs do not know the type of an extension.
_OPTIONS: Any = trajectory_pb2.Trajectory.DESCRIPTOR.GetOptions()
_MAX_TRAJECTORY_BYTES: int = _OPTIONS.Extensions[bounds_pb2.max_message_bytes]


def _size_problems(config: Tables) -> Iterator[str]:
    algorithm = config.algorithm
    sampling = config.sampling
    if config.controller.turns == "sleep" and not config.learner.offload.gives_memory_back:
        yield (
            'controller.turns = "sleep" needs learner.offload.gradients and optimizer = true: '
            "the learner gives its memory back to the engines"
        )
    metrics = config.tracking.prometheus
    if metrics == config.controller.address and not metrics.endswith(":0"):
        # The controller would be started again and again before the run fails.
        yield f"tracking.prometheus must have a port of its own, got controller.address {metrics}"
    first = config.debug.profile.start_step
    steps = config.run.steps
    if first is not None and first > steps:
        yield f"debug.profile.start_step must be at most run.steps, got {first} and {steps}"
    names = [section.name for section in config.played]
    if len(set(names)) != len(names):
        yield f"environments and evaluations need different names, got {', '.join(names)}"
    # The metric `b/c` of `a` would have the name of the metric `c` of `a/b`.
    for name in names:
        beginnings = [name[: slash.start()] for slash in re.finditer("/", name)]
        for other in set(names).intersection(beginnings):
            yield f"a name must not go on behind another environment's by /, got {name} and {other}"
    if algorithm.groups_per_step % algorithm.mini_batches:
        yield (
            f"algorithm.groups_per_step must be a multiple of mini_batches, "
            f"got {algorithm.groups_per_step} and {algorithm.mini_batches}"
        )
    yield from group_size_problems(config, algorithm.group_size, "algorithm.group_size")
    if sampling.max_reply_tokens >= sampling.max_episode_tokens:
        yield (
            f"sampling.max_episode_tokens must leave room for a prompt "
            f"beside max_reply_tokens, "
            f"got {sampling.max_episode_tokens} and {sampling.max_reply_tokens}"
        )
    if sampling.max_episode_tokens > config.learner.micro_batch_tokens * config.learner.parallel.cp:
        yield (
            f"an episode must fit one micro batch: sampling.max_episode_tokens must be at most "
            f"learner.micro_batch_tokens * learner.parallel.cp, got "
            f"{sampling.max_episode_tokens}, {config.learner.micro_batch_tokens} "
            f"and {config.learner.parallel.cp}"
        )
    num_bytes = config.trajectory_bytes()
    yield from trajectory_problems(config, num_bytes, group_size=algorithm.group_size)
    publish_s = config.weights.join_deadline_s + config.weights.bucket_deadline_s
    if config.learner.timeout_s < 2 * publish_s:
        yield (
            f"learner.timeout_s must be at least 2 * (weights.join_deadline_s + "
            f"bucket_deadline_s): ranks wait for the one that takes part in a publish, got "
            f"{config.learner.timeout_s:g}, {config.weights.join_deadline_s:g} and "
            f"{config.weights.bucket_deadline_s:g}"
        )


def group_size_problems(config: Tables, group_size: int, setting: str) -> Iterator[str]:
    """Yields a line if a group of the size in `setting` does not fit a rollout server."""
    most_episodes = config.rollout_server.max_episodes
    if group_size > most_episodes:
        yield (
            f"a group runs on one server: {setting} must be at most "
            f"rollout_server.max_episodes, got {group_size} and {most_episodes}"
        )


def trajectory_problems(config: Tables, num_bytes: int, *, group_size: int) -> Iterator[str]:
    """Yields a line if trajectories of `num_bytes` exceed a message or the queue."""
    if num_bytes > _MAX_TRAJECTORY_BYTES:
        sampling = config.sampling
        name = "max_total_tokens" if sampling.max_total_tokens else "max_episode_tokens"
        yield f"sampling.{name} of {sampling.total_tokens} makes trajectories too large to send"
    algorithm = config.algorithm
    needed = algorithm.groups_per_step * group_size * num_bytes
    if config.queue.max_bytes < needed:
        yield (
            f"queue.max_bytes must hold a batch, groups_per_step * group_size trajectories of "
            f"{num_bytes} bytes, {needed} bytes, got {config.queue.max_bytes}"
        )


def _algorithm_problems(config: Tables) -> Iterator[str]:
    algorithm = config.algorithm
    sampling = config.sampling
    cache_tokens = algorithm.reward_args.get("cache_tokens", 0)
    if algorithm.reward == "overlong" and cast(int, cache_tokens) > sampling.max_reply_tokens:
        yield (
            f"algorithm.reward_args.cache_tokens must be at most sampling.max_reply_tokens, "
            f"got {cache_tokens} and {sampling.max_reply_tokens}"
        )
    estimator = algorithm.estimator
    # A user's own advantage may read the values of a critic.
    critic = "optional" if estimator is None else estimator.critic
    if critic == "needed" and config.critic is None:
        yield f"algorithm.advantage = {algorithm.advantage!r} needs the table critic"
    if critic == "unused" and config.critic is not None:
        yield f"the table critic has no effect with algorithm.advantage = {algorithm.advantage!r}"
    if config.critic is not None and config.critic.warmup_steps >= config.run.steps:
        yield (
            f"critic.warmup_steps must be below run.steps, or the policy is never trained, "
            f"got {config.critic.warmup_steps} and {config.run.steps}"
        )
    # The policy is trained from this step on.
    first = config.critic.warmup_steps if config.critic is not None else 0
    trained_steps = config.run.steps - first
    if algorithm.decay != "none" and algorithm.warmup_steps >= trained_steps:
        yield (
            f"algorithm.warmup_steps must leave a step for algorithm.decay, got "
            f"{algorithm.warmup_steps} of {trained_steps} steps that train the policy"
        )
    if not config.needs_reference and config.reference is not None:
        yield "the table reference has no effect with algorithm.kl.coefficient = 0"


def replay_table_problems(config: Tables) -> Iterator[str]:
    """Yields one line for each setting that conflicts with `algorithm.router_replay`."""
    if config.algorithm.router_replay == "off":
        return
    for name, role in config.roles.items():
        if not isinstance(role, CriticSection) and role.policy:
            yield (
                f"algorithm.router_replay must be 'off' with {name}.policy = true: a teacher reads "
                f"tokens of which no experts are recorded, got {config.algorithm.router_replay!r}"
            )
    if not config.rollout_server.caches_prefixes:
        yield (
            "algorithm.router_replay needs rollout_server.engine.enable_prefix_caching = true: "
            "vLLM keeps the experts of tokens beside their cached prefixes"
        )
    if config.sampling.stop:
        yield (
            "algorithm.router_replay needs sampling.stop = []: experts of tokens behind a stop "
            f"string were not tested, got {list(config.sampling.stop)}"
        )
    if config.has_drafts:
        yield (
            "algorithm.router_replay excludes rollout_server.engine.speculative_config and drafts: "
            "experts of drafted tokens were not tested"
        )
    transformer = config.learner.transformer
    if transformer.get("moe_router_fusion"):
        yield (
            "learner.transformer.moe_router_fusion must be false with algorithm.router_replay: "
            "the fused kernel chooses the experts itself"
        )
    for key in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"):
        if transformer.get(key) not in (None, False, "none"):
            yield (
                f"learner.transformer.{key} cannot be set with algorithm.router_replay: "
                "a graph would replay the experts that it was recorded with"
            )


def stage_problems(config: Tables) -> Iterator[str]:
    """Yields one line for each setting that engines of several stages exclude."""
    stages = config.rollout_server.pipeline_parallel_size
    if stages == 1:
        return
    start = f"rollout_server.pipeline_parallel_size = {stages} needs "
    router_replay = config.algorithm.router_replay
    if router_replay != "off":
        yield (
            f"{start}algorithm.router_replay = 'off', got {router_replay!r}: vLLM records no "
            "experts over stages"
        )
    if config.has_drafts:
        yield (
            f"{start}neither drafts nor rollout_server.engine.speculative_config: the last stage "
            "would draft alone, which was not tried"
        )
    if config.sampling.max_images:
        yield (
            f"{start}sampling.max_images = 0, got {config.sampling.max_images}: images were not "
            "tried with stages"
        )
    if config.controller.turns == "sleep":
        yield (
            f"{start}controller.turns other than 'sleep': stages that give their memory back were "
            "not tried"
        )
    if config.rollout_server.quantization != "off":
        yield (
            f"{start}rollout_server.quantization = 'off', got "
            f"{config.rollout_server.quantization!r}: quantized stages were not tried"
        )


def _lora_problems(config: Tables) -> Iterator[str]:
    rank = config.lora.rank
    tp = config.learner.parallel.tp
    if rank % tp:
        yield f"lora.rank must be a multiple of learner.parallel.tp, got {rank} and {tp}"
    etp = config.learner.parallel.etp or tp
    if rank % etp and config.lora.has_mlp:
        yield f"lora.rank must be a multiple of learner.parallel.etp, got {rank} and {etp}"
    for section in config.played:
        if refusal := config.lora.refusal(section.adapter or ""):
            yield f"{section.name}: {refusal}"
    excluded = {
        "a critic": config.critic is not None,
        "reference.refresh_every_steps": config.reference and config.reference.refresh_every_steps,
        **{name: config.learner.optimizer.get(name) for name in NOT_EXCHANGED},
    }
    for name, is_set in excluded.items():
        if config.lora.adapters and is_set:
            names = ", ".join(config.lora.adapters)
            yield f"lora.adapters must be empty with {name}, got {names}"
    if rank and config.checkpoint.load is not None:
        yield f"checkpoint.load holds no adapters: lora.rank must be 0 with it, got {rank}"


def _option_problems(config: Tables) -> Iterator[str]:
    for manifest in active(config):
        if manifest.rules:
            yield from resolve(manifest.rules)(config)


def section_of(name: str) -> type[BaseModel] | None:
    """Returns the section of the table `extensions.NAME`; None if no package has one."""
    for manifest in installed():
        if manifest.name == name and manifest.settings:
            section: type[BaseModel] = resolve(manifest.settings)
            return section
    entries = entry_points(group="slipstream.settings", name=name)
    return entries[name].load() if entries else None


def _extension_problems(config: Tables) -> Iterator[str]:
    for name, table in config.extensions.items():
        model = section_of(name)
        if model is None:
            yield f"extensions.{name} is a table of no installed package"
            continue
        try:
            model.model_validate(table)
        except ValidationError as error:
            for fault in error.errors():
                place = ".".join(map(str, ("extensions", name, *fault["loc"])))
                yield f"{place}: {fault['msg']}, got {fault['input']!r}"


def _export_problems(config: Tables) -> Iterator[str]:
    every = config.checkpoint.export_every
    if every and config.controller.client_loop:
        yield (
            "checkpoint.export_every must be 0 with controller.client_loop, whose client says when "
            f"weights are saved and exports them itself, got {every}"
        )


TABLE_RULES: tuple[Callable[[Tables], Iterator[str]], ...] = (
    lambda config: world_problems(config.learner),
    lambda config: table_problems(config.learner),
    lambda config: engine_problems(config.rollout_server),
    _served_problems,
    _size_problems,
    _precision_problems,
    unmet,
    _option_problems,
    _cut_problems,
    _engine_problems,
    _version_problems,
    _length_problems,
    _algorithm_problems,
    replay_table_problems,
    stage_problems,
    _role_problems,
    _lora_problems,
    _extension_problems,
    _export_problems,
)
