"""All tables of a run's settings, each checked without the others."""

import json
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import JsonValue, create_model
from slipstream.core.errors import ConfigError
from slipstream.core.extension import (
    active,
    asks_for,
    installed,
    own_functions,
    top_tables,
)
from slipstream.core.kept_tokens import BYTES_PER_COUNT, BYTES_PER_ID, MAX_KEPT_TOKENS
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.measurement_sections import (
    DebugSection,
    EvaluationSection,
    PlayedSection,
    TrackingSection,
)
from slipstream.core.settings.role_sections import (
    AgentsSection,
    CriticSection,
    LoraSection,
    ReferenceSection,
    RoleSection,
    teacher_setting,
)
from slipstream.core.settings.section import ElementType, Section
from slipstream.core.settings.sections import (
    CheckpointSection,
    ControllerSection,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    QueueSection,
    RolloutServerSection,
    RunSection,
    SamplingSection,
    SecuritySection,
    WeightsSection,
)

# Bytes of a trajectory in a queue apart from its tokens: names, metrics, texts, 16 branches.
TRAJECTORY_OVERHEAD_BYTES = 2048
BYTES_PER_BRANCH = 96
BYTES_PER_TOKEN = 24
# Largest gap of a probe by element type: float16 rounds eight times finer than bfloat16.
PROBE_TOLERANCES: Mapping[ElementType, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.16}
# The thing that a run without a task of its own waits for.
NO_ENVIRONMENT = (
    "the settings have no environment: the first step waits until a client serves or submits one "
    "(slipstream submit MODULE:CLASS), else add [[environments]]"
)


Table = TypeVar("Table", bound=Section)
# A mark of settings, such as `Fixed`.
Mark = TypeVar("Mark")


class _FirstTables(Section):
    """The tables before those that extensions add."""

    run: RunSection
    model: ModelSection
    algorithm: AlgorithmSection = AlgorithmSection()
    sampling: SamplingSection = SamplingSection()
    environments: tuple[EnvironmentSection, ...] = ()
    evaluations: tuple[EvaluationSection, ...] = ()
    controller: ControllerSection = ControllerSection()
    learner: LearnerSection = LearnerSection()
    reference: ReferenceSection | None = None
    critic: CriticSection | None = None


if TYPE_CHECKING:
    _AddedTables = _FirstTables
else:
    _AddedTables = create_model(
        "_AddedTables",
        __base__=_FirstTables,
        **{name: (section | None, None) for name, section in top_tables().items()},
    )


class Tables(_AddedTables):
    """All settings of a run, before the rules between them are checked."""

    lora: LoraSection = LoraSection()
    rollout_server: RolloutServerSection = RolloutServerSection()
    queue: QueueSection = QueueSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    security: SecuritySection = SecuritySection()
    agents: AgentsSection = AgentsSection()
    tracking: TrackingSection = TrackingSection()
    debug: DebugSection = DebugSection()
    # Tables of other packages, by the names of their entry points in `slipstream.settings`.
    extensions: dict[str, dict[str, JsonValue]] = {}
    # Names of the settings that the run chose by itself (`configuration.automatic`).
    automatic: tuple[str, ...] = ()
    # Digests of the sources of one's own functions (`configuration.function_sources`), of the
    # tokenizer, and of the weights with which the models began.
    sources: dict[str, str] = {}

    @classmethod
    def marked(cls, mark: type[Mark]) -> dict[str, Mark]:
        """Returns the marks of one kind by the names of the settings that have them."""
        marks: dict[str, Mark] = {}
        for table, field in cls.model_fields.items():
            section = field.annotation
            if not isinstance(section, type) or not issubclass(section, Section):
                continue
            for name, setting in section.model_fields.items():
                for entry in setting.metadata:
                    if isinstance(entry, mark):
                        marks[f"{table}.{name}"] = entry
        return marks

    def top_table(self, name: str, section: type[Table]) -> Table | None:
        """Returns the table `name`, which an extension adds at the top; None if it is left out."""
        table = getattr(self, name)
        if not isinstance(table, section | None):
            raise TypeError(f"the table {name} is no {section.__name__}")
        return table

    def table_of(self, name: str, section: type[Table]) -> Table:
        """Returns the table `extensions.NAME` as its section, with defaults if it is left out."""
        return section.model_validate(self.extensions.get(name, {}))

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def played(self) -> tuple[PlayedSection, ...]:
        return (*self.environments, *self.evaluations)

    @property
    def probe_tolerance(self) -> float:
        """The largest log-probability gap, in nats, with which a probe passes."""
        if self.rollout_server.computes_in_fp8 or self.learner.computes_in_fp8:
            return 0.5
        return PROBE_TOLERANCES[self.model.dtype]

    @property
    def training_warnings(self) -> list[str]:
        """What a user should know of settings that are allowed, a line each."""
        algorithm = self.algorithm
        is_cut = bool(self.sampling.cuts) and not self.replays_sampling
        stale = algorithm.staleness_warning(is_cut=is_cut)
        warnings = [] if stale is None else [stale]
        first = self.critic.warmup_steps if self.critic is not None else 0
        steps = self.run.steps - first
        if algorithm.warmup_steps > steps:
            warnings.append(
                f"algorithm.warmup_steps is {algorithm.warmup_steps}, but {steps} steps train the "
                "policy: the learning rate never rises to algorithm.learning_rate"
            )
        if algorithm.reward == "overlong" and algorithm.filter == "none":
            warnings.append(
                "algorithm.reward = 'overlong' with filter = 'none': groups whose answers are all "
                "wrong, or all right, are trained by their lengths alone; filter = "
                "'unequal_rewards' leaves them out"
            )
        return warnings

    @property
    def may_stage(self) -> bool:
        """Whether weights may arrive on a server beside those that serve.

        They would take the memory that sleeping engines free, and vLLM's loader must quantise them
        while requests wait.
        """
        return self.controller.turns != "sleep" and self.rollout_server.quantization == "off"

    def trajectory_bytes(self, *, routing_bytes_per_token: int = 0) -> int:
        """Returns an upper bound of a trajectory's bytes in a queue.

        `routing_bytes_per_token` is the size of a token's recorded experts, 0 if none are recorded.
        """
        per_token = BYTES_PER_TOKEN + routing_bytes_per_token
        if self.replays_sampling:
            most_kept = self.sampling.top_k or MAX_KEPT_TOKENS
            per_token += BYTES_PER_COUNT + BYTES_PER_ID * most_kept
        if self.reference is not None and self.reference.servers:
            # A log-probability, and the most likely tokens with theirs.
            per_token += 4 + 8 * self.reference.top_k
        if self.needs_reference:
            # The prompt of a teacher, which has at most as many tokens as an episode.
            per_token += 4
        branches = BYTES_PER_BRANCH * max(0, self.sampling.max_branches - 16)
        images = self.sampling.max_images * self.sampling.max_image_bytes
        tokens = per_token * self.sampling.total_tokens
        return TRAJECTORY_OVERHEAD_BYTES + branches + images + tokens

    @property
    def engine_settings(self) -> str:
        """The settings that a server reads in its own file and must share, in one line of JSON.

        They decide the engine, its samples and how weights arrive. The place of storage may have
        another name for each process. Beside them stands what the file says of the algorithm, which
        the controller's alone decides: `algorithm` has those values by name.
        """
        shared: dict[str, JsonValue] = {"model.dtype": self.model.dtype}
        of_engines = self.algorithm.of_engines
        shared |= {f"algorithm.{name}": value for name, value in of_engines.items()}
        stated = self.algorithm.model_dump(mode="json", exclude_unset=True)
        shared["algorithm"] = {
            name: value
            for name, value in stated.items()
            if name not in of_engines and f"algorithm.{name}" not in self.automatic
        }
        shared["sampling is replayed"] = self.replays_sampling
        for manifest in installed():
            for name in manifest.engine_settings:
                shared[name] = attrgetter(name)(self) if asks_for(self, manifest) else 0
        for name, section in (("sampling", self.sampling), ("weights", self.weights)):
            values = section.model_dump(mode="json", exclude={"storage_url"})
            shared |= {f"{name}.{key}": value for key, value in values.items()}
        return json.dumps(shared)

    @property
    def own_functions(self) -> list[str]:
        """The user's own functions, "module:function": the algorithm's and those of extensions."""
        return [*self.algorithm.own_functions.values(), *own_functions(self)]

    @property
    def replays_sampling(self) -> bool:
        """Whether the learner's probabilities are over the tokens that engines drew from."""
        return any(manifest.replays_sampling for manifest in active(self))

    @property
    def scores_versions(self) -> bool:
        """Whether the trainer estimates log-probabilities by the versions that sampled tokens."""
        return any(manifest.scores_versions for manifest in active(self))

    @property
    def needs_reference(self) -> bool:
        """Whether a step uses the reference model, for a KL penalty or the user's own functions."""
        algorithm = self.algorithm
        has_readers = bool(algorithm.own_functions) and self.reference is not None
        return algorithm.kl.coefficient > 0 or has_readers

    @property
    def has_plain_reference(self) -> bool:
        """Whether a model scores the tokens of environments without a teacher by name."""
        if not self.needs_reference:
            return False
        reference = self.reference
        if reference is None or not reference.teachers or reference.names_model:
            return True
        names = [section.name for section in self.environments]
        return not names or not all(map(reference.teacher_of, names))

    def teacher_refusal(self, environment: str) -> str:
        """Returns why an environment cannot be trained without a teacher, or "" if it can."""
        reference = self.reference
        if reference is None or not self.needs_reference or self.has_plain_reference:
            return ""
        if reference.teacher_of(environment):
            return ""
        names = ", ".join(reference.teachers)
        return (
            f"{environment} must be among the environments of a teacher ({names}): the run has no "
            "other reference model"
        )

    @property
    def has_drafts(self) -> bool:
        """Whether engines draft tokens, with a layer of an option or as vLLM is told."""
        return self.rollout_server.drafts or any(
            asks_for(self, manifest) for manifest in installed() if manifest.drafts
        )

    @property
    def roles(self) -> dict[str, RoleSection]:
        """The tables of models besides the policy, by the names of these tables."""
        roles: dict[str, RoleSection] = {}
        if self.reference is not None:
            roles["reference"] = self.reference
            for name, teacher in self.reference.teachers.items():
                roles[teacher_setting(name)] = teacher
        if self.critic is not None:
            roles["critic"] = self.critic
        return roles

    @property
    def role_folders(self) -> dict[str, Path]:
        """The folders of the roles that have one of their own, by the settings that name them."""
        folders = {f"{name}.path": role.path for name, role in self.roles.items()}
        return {setting: folder for setting, folder in folders.items() if folder is not None}

    @property
    def weight_folders(self) -> dict[str, Path]:
        """The folders of weights besides `model.path`, by the settings that name them."""
        load = self.checkpoint.load
        return self.role_folders if load is None else {**self.role_folders, "checkpoint.load": load}


def taken_names(names: Iterable[str]) -> list[str]:
    """Returns those names of extensions' tables that built-in ones have, sorted."""
    built_in = _FirstTables.model_fields.keys() | vars(Tables)["__annotations__"].keys()
    return sorted(built_in & set(names))


for _name in taken_names(top_tables()):
    raise ConfigError(f"an installed extension adds the table {_name}, which is built in")
