"""The settings of a whole run, and the rules between its sections."""

from __future__ import annotations

import itertools
from pathlib import Path

from pydantic import model_validator
from slipstream.protocol.codec import MAX_TRAJECTORY_BYTES
from slipstream.protocol.machine.address import address_parts
from slipstream.protocol.reference_logprobs import reference_bytes_per_token
from slipstream.protocol.reservation import smallest_queue
from slipstream.protocol.settings.algorithm_section import AlgorithmSection
from slipstream.protocol.settings.checkpoint_section import CheckpointSection
from slipstream.protocol.settings.engine_precision import computes_in_fp8, precision_problems
from slipstream.protocol.settings.engine_table import engine_problems
from slipstream.protocol.settings.environment_algorithm import EnvironmentAlgorithms
from slipstream.protocol.settings.lora_section import NOT_EXCHANGED, LoraSection
from slipstream.protocol.settings.measurement_rules import length_problems, profile_problems
from slipstream.protocol.settings.measurement_sections import (
    EvaluationSection,
    ProfileSection,
    TrackingSection,
)
from slipstream.protocol.settings.parallel_rules import (
    replay_problems,
    table_problems,
    world_problems,
)
from slipstream.protocol.settings.queue_section import QueueSection
from slipstream.protocol.settings.role_rules import role_problems
from slipstream.protocol.settings.role_sections import (
    CriticSection,
    ReferenceSection,
    RoleSection,
    served_problems,
)
from slipstream.protocol.settings.sampling_section import SamplingSection
from slipstream.protocol.settings.section import Section
from slipstream.protocol.settings.sections import (
    ControllerSection,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    OffloadSection,
    ParallelSection,
    RolloutServerSection,
    RunSection,
    SecuritySection,
)
from slipstream.protocol.settings.storage_rules import storage_problems
from slipstream.protocol.settings.turn_rules import turn_problems
from slipstream.protocol.settings.weights_section import StageSetting, WeightsSection

__all__ = [
    "AlgorithmSection",
    "CheckpointSection",
    "Config",
    "ControllerSection",
    "CriticSection",
    "EnvironmentSection",
    "EvaluationSection",
    "LearnerSection",
    "LoraSection",
    "ModelSection",
    "OffloadSection",
    "ParallelSection",
    "ProfileSection",
    "QueueSection",
    "ReferenceSection",
    "RolloutServerSection",
    "RunSection",
    "SamplingSection",
    "Section",
    "SecuritySection",
    "TrackingSection",
    "WeightsSection",
    "address_parts",
]

# Bytes of a trajectory in a queue beside its tokens: names, metrics, texts, and 16 branches.
TRAJECTORY_OVERHEAD_BYTES = 2048
BYTES_PER_BRANCH = 96
BYTES_PER_TOKEN = 24


class Config(Section):
    """All settings of a run."""

    run: RunSection
    model: ModelSection
    algorithm: AlgorithmSection
    sampling: SamplingSection
    environments: tuple[EnvironmentSection, ...] = ()
    evaluations: tuple[EvaluationSection, ...] = ()
    controller: ControllerSection = ControllerSection()
    learner: LearnerSection = LearnerSection()
    reference: ReferenceSection | None = None
    critic: CriticSection | None = None
    lora: LoraSection = LoraSection()
    rollout_server: RolloutServerSection = RolloutServerSection()
    queue: QueueSection = QueueSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    security: SecuritySection = SecuritySection()
    tracking: TrackingSection = TrackingSection()

    @property
    def run_dir(self) -> Path:
        """The folder of all files of the run."""
        return self.run.dir / self.run.name

    @property
    def probe_tolerance(self) -> float:
        """Largest gap, in nats, of a probe that passes."""
        if self.weights.probe_tolerance is not None:
            return self.weights.probe_tolerance
        if computes_in_fp8(self.rollout_server):
            return 0.5
        rounds = "bfloat16" in (self.model.dtype, self.weights.wire_dtype)
        return 0.16 if rounds else 1e-3

    @property
    def staging(self) -> StageSetting:
        """`weights.stage_on_server`, but for "auto" of engines that give their memory back."""
        stage = self.weights.stage_on_server
        return False if stage == "auto" and self.controller.turns == "sleep" else stage

    @property
    def max_trajectory_bytes(self) -> int:
        """Upper bound of a trajectory's bytes in a queue, without experts."""
        return self.trajectory_bytes()

    def trajectory_bytes(self, *, routing_bytes_per_token: int = 0) -> int:
        """Returns `max_trajectory_bytes` with bytes for the experts of each token."""
        per_token = BYTES_PER_TOKEN + routing_bytes_per_token
        if self.reference is not None and self.reference.server is not None:
            per_token += reference_bytes_per_token(self.reference.top_k)
        branches = BYTES_PER_BRANCH * max(0, self.sampling.max_branches - 16)
        images = self.sampling.max_images * self.sampling.max_image_bytes
        tokens = per_token * self.sampling.total_tokens
        return TRAJECTORY_OVERHEAD_BYTES + branches + images + tokens

    def check_trajectory_bytes(self, num_bytes: int) -> None:
        """Raises ValueError when trajectories are too large to send, or for the queue."""
        if num_bytes > MAX_TRAJECTORY_BYTES:
            sampling = self.sampling
            name = "max_total_tokens" if sampling.max_total_tokens else "max_episode_tokens"
            raise ValueError(
                f"sampling.{name} of {sampling.total_tokens} makes trajectories too large to send"
            )
        algorithm = self.algorithm
        needed = smallest_queue(algorithm.groups_per_step, algorithm.group_size, num_bytes)
        if self.queue.max_bytes < needed:
            raise ValueError(
                f"queue.max_bytes must hold a batch, groups_per_step * group_size trajectories of "
                f"{num_bytes} bytes, {needed} bytes, got {self.queue.max_bytes}"
            )

    @property
    def algorithms(self) -> EnvironmentAlgorithms:
        """The algorithm of each environment; made anew by each call."""
        tables = [(each.name, each.algorithm) for each in self.environments]
        return EnvironmentAlgorithms.of(self.algorithm, tables)

    def algorithm_of(self, environment: str) -> AlgorithmSection:
        """The algorithm of one environment."""
        if all(each.algorithm is None for each in self.environments):
            return self.algorithm
        return self.algorithms.get(environment)

    @property
    def roles(self) -> dict[str, RoleSection]:
        """The tables of the models beside the policy that the file has, by name."""
        tables = {"reference": self.reference, "critic": self.critic}
        return {name: table for name, table in tables.items() if table is not None}

    @model_validator(mode="after")
    def _sizes(self) -> Config:
        algorithm, sampling, server = self.algorithm, self.sampling, self.rollout_server
        names = [e.name for e in self.environments] + [e.name for e in self.evaluations]
        if len(set(names)) != len(names):
            raise ValueError(
                f"environments and evaluations need different names, got {', '.join(names)}"
            )
        if algorithm.groups_per_step % algorithm.mini_batches:
            raise ValueError(
                f"algorithm.groups_per_step must be a multiple of mini_batches, "
                f"got {algorithm.groups_per_step} and {algorithm.mini_batches}"
            )
        shared, most = server.shared_max_episodes, server.max_episodes
        if shared is not None and shared > most:
            raise ValueError(
                f"rollout_server.shared_max_episodes must be at most max_episodes, "
                f"got {shared} and {most}"
            )
        if algorithm.group_size > (shared or most):
            name = "max_episodes" if shared is None else "shared_max_episodes"
            raise ValueError(
                f"a group runs on one server: algorithm.group_size must be at most "
                f"rollout_server.{name}, got {algorithm.group_size} and {shared or most}"
            )
        if sampling.max_reply_tokens >= sampling.max_episode_tokens:
            raise ValueError(
                f"sampling.max_episode_tokens must leave room for a prompt "
                f"beside max_reply_tokens, "
                f"got {sampling.max_episode_tokens} and {sampling.max_reply_tokens}"
            )
        if sampling.max_episode_tokens > self.learner.micro_batch_tokens * self.learner.parallel.cp:
            raise ValueError(
                f"an episode must fit one micro batch: sampling.max_episode_tokens must be at most "
                f"learner.micro_batch_tokens * learner.parallel.cp, got "
                f"{sampling.max_episode_tokens}, {self.learner.micro_batch_tokens} "
                f"and {self.learner.parallel.cp}"
            )
        self.check_trajectory_bytes(self.max_trajectory_bytes)
        if self.controller.heartbeat_timeout_s < 3 * self.controller.heartbeat_s:
            raise ValueError(
                f"controller.heartbeat_timeout_s must be at least 3 * heartbeat_s, got "
                f"{self.controller.heartbeat_timeout_s} and {self.controller.heartbeat_s}"
            )
        publish_s = self.weights.join_deadline_s + self.weights.bucket_deadline_s
        if self.learner.timeout_s < 2 * publish_s:
            raise ValueError(
                f"learner.timeout_s must be at least 2 * (weights.join_deadline_s + "
                f"bucket_deadline_s): ranks wait for the one that takes part in a publish, got "
                f"{self.learner.timeout_s:g}, {self.weights.join_deadline_s:g} and "
                f"{self.weights.bucket_deadline_s:g}"
            )
        distinct = self.algorithms.distinct
        for problem in itertools.chain(
            world_problems(self.learner),
            table_problems(self.learner),
            engine_problems(server.engine, max_episodes=server.max_episodes),
            precision_problems(
                server, model=self.model, lora=self.lora, weights=self.weights, algorithms=distinct
            ),
            storage_problems(server, self.weights, self.lora),
            turn_problems(self.controller, self.learner, server, self.weights),
            length_problems(sampling, self.evaluations),
            profile_problems(self.learner, self.run),
            served_problems(self.reference, self.algorithms, sampling.temperature),
        ):
            raise ValueError(problem)
        lag = algorithm.max_staleness
        if self.weights.publish_every_steps > lag + 1:
            raise ValueError(
                f"weights.publish_every_steps must be at most algorithm.max_staleness + 1: later "
                f"steps would find no server that may start a group for them, got "
                f"{self.weights.publish_every_steps} and {lag}"
            )
        check_algorithm(self)
        check_router_replay(self)
        for problem in role_problems(self.roles, self.learner, sampling):
            raise ValueError(problem)
        check_lora(self)
        return self


def check_algorithm(config: Config) -> None:
    """Raises ValueError when the algorithm needs settings that other sections lack."""
    algorithm, sampling = config.algorithm, config.sampling
    for environment in config.environments:
        own = environment.algorithm
        if own is not None and (refusal := own.refusal(algorithm)):
            raise ValueError(f"algorithm of environment {environment.name}: {refusal}")
    for each in config.algorithms.distinct:
        if each.overlong.cache_tokens > sampling.max_reply_tokens:
            raise ValueError(
                f"algorithm.overlong.cache_tokens must be at most sampling.max_reply_tokens, "
                f"got {each.overlong.cache_tokens} and {sampling.max_reply_tokens}"
            )
    if algorithm.advantage == "gae" and config.critic is None:
        raise ValueError("algorithm.advantage = 'gae' needs the table critic")
    if algorithm.advantage != "gae" and config.critic is not None:
        raise ValueError(
            f"the table critic has no effect with algorithm.advantage = {algorithm.advantage!r}"
        )
    if config.critic is not None and config.critic.warmup_steps >= config.run.steps:
        raise ValueError(
            f"critic.warmup_steps must be below run.steps, or the policy is never trained, "
            f"got {config.critic.warmup_steps} and {config.run.steps}"
        )
    first = config.critic.warmup_steps if config.critic is not None else 0
    rising_and_falling = algorithm.warmup_steps + (algorithm.decay_steps or 1)
    if algorithm.decay != "none" and first + rising_and_falling > config.run.steps:
        raise ValueError(
            f"algorithm.warmup_steps and decay_steps must fit into the steps that train the "
            f"policy, got {algorithm.warmup_steps} and {algorithm.decay_steps or 1} for "
            f"{config.run.steps - first}"
        )
    if not config.algorithms.measures_divergence and config.reference is not None:
        raise ValueError("the table reference has no effect with algorithm.kl.coefficient = 0")


def check_router_replay(config: Config) -> None:
    """Raises ValueError when a setting prevents that experts are recorded or replayed."""
    if config.algorithm.router_replay == "off":
        return
    if not config.rollout_server.enable_prefix_caching:
        raise ValueError(
            "algorithm.router_replay needs rollout_server.enable_prefix_caching = true: "
            "vLLM keeps the experts of tokens beside their cached prefixes"
        )
    if config.sampling.stop:
        raise ValueError(
            "algorithm.router_replay needs sampling.stop = []: experts of tokens behind a stop "
            f"string were not tested, got {list(config.sampling.stop)}"
        )
    if config.rollout_server.drafts != "off":
        raise ValueError(
            'algorithm.router_replay needs rollout_server.drafts = "off": experts of drafted '
            f"tokens were not tested, got {config.rollout_server.drafts!r}"
        )
    for problem in replay_problems(config.learner.transformer):
        raise ValueError(problem)


def check_lora(config: Config) -> None:
    """Raises ValueError when the adapters do not fit the layout or the loaded weights."""
    rank, tp = config.lora.rank, config.learner.parallel.tp
    if rank % tp:
        raise ValueError(
            f"lora.rank must be a multiple of learner.parallel.tp, got {rank} and {tp}"
        )
    etp = config.learner.parallel.etp or tp
    if rank % etp and config.lora.has_mlp:
        raise ValueError(
            f"lora.rank must be a multiple of learner.parallel.etp, got {rank} and {etp}"
        )
    adapters = {section.name: section.adapter for section in config.environments}
    adapters |= {section.name: section.adapter for section in config.evaluations}
    for name, adapter in adapters.items():
        if refusal := config.lora.refusal(adapter or ""):
            raise ValueError(f"{name}: {refusal}")
    alone = {
        "a critic": config.critic is not None,
        "reference.refresh_every_steps": config.reference and config.reference.refresh_every_steps,
        "learner.offload": any(config.learner.offload.model_dump().values()),
        **{name: config.learner.optimizer.get(name) for name in NOT_EXCHANGED},
    }
    for name, is_set in alone.items():
        if config.lora.adapters and is_set:
            names = ", ".join(config.lora.adapters)
            raise ValueError(f"lora.adapters must be empty with {name}, got {names}")
    if rank and config.checkpoint.load is not None:
        raise ValueError(
            f"checkpoint.load holds no adapters: lora.rank must be 0 with it, got {rank}"
        )
