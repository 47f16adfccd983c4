"""The settings of what a run has besides the policy: adapters, reference and critic."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from slipstream.core.machine.address import address_parts, is_unspecified
from slipstream.core.settings.section import Address, Fixed, Seconds, Section
from slipstream.core.settings.sections import LearnerSection, ParallelSection, RoleParallelSection
from slipstream.core.types import MAX_TOP_K

# Megatron's matrices, each with the names of its parts in Hugging Face models.
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
# The separate matrices before latent attention.
LATENT = {
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
# The matrices before and behind a gated delta net.
DELTA_NET_INPUTS = {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}
DELTA_NET_OUTPUTS: dict[str, tuple[str, ...]] = {"out_proj": ("out_proj",)}
# Matrices of other layers for which a name of `target_modules` stands too.
ALSO_NAMED: Mapping[str, dict[str, tuple[str, ...]]] = {
    "linear_qkv": {**LATENT, **DELTA_NET_INPUTS},
    "linear_proj": DELTA_NET_OUTPUTS,
}
Target = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]

ATTENTION = ("linear_qkv", "linear_proj")
# Matrices of dense MLPs and of experts.
MLP = ("linear_fc1", "linear_fc2")
# The largest rank for which vLLM has kernels.
MAX_SERVED_RANK = 512
# An engine has room for all adapters of a run at once.
MAX_ADAPTERS = 16
# Settings of `learner.optimizer` with which Megatron keeps state elsewhere than torch's optimizers:
# several adapters could not be exchanged.
NOT_EXCHANGED = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def matrices_named(targets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the matrices for which Megatron's names in `targets` stand in any kind of layer.

    Each has the names of its parts in Hugging Face models.
    """
    matrices: dict[str, tuple[str, ...]] = {}
    for name in targets:
        matrices[name] = FUSED[name]
        matrices |= ALSO_NAMED.get(name, {})
    return matrices


class AgentsSection(Section):
    """Where agents beyond their rollout host reach the model, and whether their calls are kept."""

    # Address HOST:PORT at which each rollout host takes calls of agents whose environment
    # `needs_url`. All workers and servers of a host share it. Beyond loopback it needs
    # `security.tls_certificate`. By default agents call on loopback, or by a socket.
    listen: Address | None = None
    # URL by which agents reach that address, such as that of a tunnel; {host} is the name of the
    # rollout host. By default `listen` itself, with https where there is a certificate.
    url: str | None = None
    # Whether each answered call of an agent that trains is kept in the run's folder. If its worker,
    # server or controller dies, the program starts anew, and its calls so far are answered as
    # before: nothing that it has read is sampled twice. A program's own actions are done again.
    recover: bool = False

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.listen is None:
            if self.url is not None:
                raise ValueError("agents.url needs agents.listen, to which it must lead")
            return self
        host, port = address_parts(self.listen)
        if port == 0:
            raise ValueError(f"agents.listen must have a port that is not 0, got {self.listen}")
        if self.url is None:
            if is_unspecified(host):
                raise ValueError(
                    f"agents.listen = {self.listen} is every address of a host: agents.url must "
                    "say by which one agents reach it"
                )
            return self
        parts = urlsplit(self.url.replace("{host}", "host"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"agents.url must begin with http://HOST or https://HOST, got {self.url}"
            )
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"agents.url must have no query, mark or user, got {self.url}")
        return self


class LoraSection(Section):
    """Low-rank adapters that are trained in place of the policy's parameters."""

    # Rank of the adapters, a multiple of `learner.parallel.tp`. With 0 all parameters are trained.
    rank: Annotated[int, Fixed("checkpoints hold adapters of this rank, or none")] = Field(0, ge=0)
    # An adapter's product is multiplied by `alpha` / `rank`.
    alpha: Annotated[float, Fixed("the weights are made with it")] = Field(32.0, gt=0)
    # Matrices with adapters, by Megatron's or Hugging Face's names. Parts of a fused matrix go
    # together and share a factor. `linear_qkv` also names the matrices before latent attention and
    # before delta nets, `linear_proj` those behind delta nets.
    target_modules: Annotated[
        tuple[Target, ...], Fixed("checkpoints hold adapters of these matrices")
    ] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    # `merged` sends merged weights, `adapters` the adapters alone once a server has the matrices.
    # On GPUs that needs half precision.
    publish: Annotated[
        Literal["merged", "adapters"],
        Fixed("recorded digests are of merged weights or of matrices and adapters"),
    ] = "merged"

    # Names of several adapters, one for each environment (`environments[].adapter`). By default all
    # share one.
    adapters: Annotated[
        tuple[AdapterName, ...],
        Field(max_length=MAX_ADAPTERS),
        Fixed("checkpoints hold these adapters"),
    ] = ()

    @property
    def publishes_adapters(self) -> bool:
        return self.publish == "adapters"

    @property
    def modules(self) -> tuple[str, ...]:
        targets = set(self.target_modules)
        return tuple(name for name, parts in FUSED.items() if targets & {name, *parts})

    @property
    def has_mlp(self) -> bool:
        return self.rank > 0 and bool(set(self.modules) & set(MLP))

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.target_modules:
            raise ValueError("lora.target_modules must name a matrix, got none")
        if self.model_fields_set and "rank" not in self.model_fields_set:
            raise ValueError(
                f"lora.rank must be given with lora.{min(self.model_fields_set)}: without it all "
                "parameters are trained, and no adapter (0)"
            )
        if self.publishes_adapters and not 1 <= self.rank <= MAX_SERVED_RANK:
            raise ValueError(
                f"lora.rank must be 1 to {MAX_SERVED_RANK} with lora.publish = adapters, "
                f"got {self.rank}"
            )
        if self.adapters and not self.publishes_adapters:
            raise ValueError(
                "lora.publish must be adapters with several adapters (lora.adapters), got "
                f"{self.publish!r}: merged weights hold one"
            )
        if len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"lora.adapters must differ, got {', '.join(self.adapters)}")
        targets = set(self.target_modules)
        for name, parts in FUSED.items():
            missing = set(parts) - targets
            if name not in targets and missing != set(parts) and missing:
                raise ValueError(
                    f"lora.target_modules must hold all of {', '.join(parts)} or none, "
                    f"{' and '.join(sorted(missing))} is missing"
                )
        return self

    def refusal(self, adapter: str) -> str:
        """Returns why an environment cannot have `adapter`, or "" if it can."""
        if adapter in (self.adapters or ("",)):
            return ""
        if not self.adapters:
            return f"adapter must be left out without lora.adapters, got {adapter!r}"
        names = ", ".join(self.adapters)
        shown = repr(adapter) if adapter else "none"
        return f"adapter must be one of lora.adapters ({names}), got {shown}"


class ReferenceServerSection(Section):
    """A vLLM server that runs the reference model, with OpenAI's API and `prompt_logprobs`.

    Rollout servers send it every episode that may be trained, a teacher's server those of the
    teacher's environments. Its tokenizer must be the policy's.
    """

    # Address of its API, such as http://127.0.0.1:9000/v1.
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?/v1/?$")]
    # Name of the model there.
    model: str
    # File with the server's key, if it asks for one.
    api_key_file: Path | None = None
    # Limit of one call. Beyond it, and after 408, 409, 429, 5xx or a broken connection, the call is
    # repeated, five times at most. Then the episode fails.
    timeout_s: Seconds = 120.0


class TeacherSection(Section):
    """A teacher, NAME, which some environments have in place of the reference.

    The names are yours. Exactly one of `path`, `policy = true` and a table `server` says which
    model it is. An environment that no teacher names has the reference itself; if the teachers have
    all of `environments`, and `[reference]` names no model, there is no other one. See
    [several teachers](guides/distillation.md#several-teachers).
    """

    # Names of the environments whose tokens it scores. Each has one teacher.
    environments: tuple[str, ...] = Field(min_length=1)
    # Hugging Face folder of a model on the policy's ranks.
    path: Path | None = None
    # The policy itself as it is before each step, with its adapters.
    policy: bool = False
    # A table of its own, as the reference's.
    parallel: RoleParallelSection | None = None
    # A table of its own, as the reference's: the model is behind a server.
    server: ReferenceServerSection | None = None

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        stated = [name for name in ("path", "policy", "server") if getattr(self, name)]
        if len(stated) != 1:
            raise ValueError(
                "a teacher needs exactly one of path, policy = true and the table server, got "
                f"{' and '.join(stated) or 'none'}"
            )
        if self.parallel is not None and self.path is None:
            raise ValueError(f"parallel has no effect with {stated[0]}: no model is loaded")
        return self


TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class ReferenceSection(Section):
    """The model from which the policy's divergence is measured, by default on the policy's ranks.

    It exists when `algorithm.kl.coefficient` > 0. Without a table `parallel`, of `tp`, `pp`, `cp`
    and `ep`, it has the policy's layout. With `lora.rank` > 0, default settings and no
    `algorithm.router_replay`, it is the policy with its adapters switched off, and takes no memory
    of its own.
    """

    # Hugging Face folder, by default `model.path`.
    path: Path | None = None
    # The policy itself as it is before each step, as a
    # [teacher that reads more](guides/distillation.md#a-teacher-that-reads-more).
    policy: bool = False
    # Take the policy's weights after every n-th step. 0 means never.
    refresh_every_steps: int = Field(0, ge=0)
    # A table of its own, below.
    parallel: RoleParallelSection | None = None
    # Most likely tokens of each position, for the top-k estimators. A server gives at most its
    # --max-logprobs, 20 by default.
    top_k: int = Field(0, ge=0, le=MAX_TOP_K)
    # A table of its own, below: the model is behind a server, and the ranks load none.
    server: ReferenceServerSection | None = None
    # Tables of their own, below.
    teachers: dict[TeacherName, TeacherSection] = {}

    @property
    def names_model(self) -> bool:
        """Whether the table says which model scores environments without a teacher by name."""
        stated = (self.path, self.policy, self.refresh_every_steps, self.parallel, self.server)
        return any(stated)

    @property
    def servers(self) -> dict[str, ReferenceServerSection]:
        """The servers of models, by the setting that names each."""
        servers: dict[str, ReferenceServerSection] = {}
        if self.server is not None:
            servers["reference.server"] = self.server
        for name, teacher in self.teachers.items():
            if teacher.server is not None:
                servers[f"{teacher_setting(name)}.server"] = teacher.server
        return servers

    def teacher_of(self, environment: str) -> str:
        """Returns the name of an environment's teacher; "" for the reference itself."""
        for name, teacher in self.teachers.items():
            if environment in teacher.environments:
                return name
        return ""

    def server_of(self, environment: str) -> ReferenceServerSection | None:
        """Returns the server that scores an environment's tokens, if one does."""
        name = self.teacher_of(environment)
        return self.teachers[name].server if name else self.server

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        fields = type(self).model_fields
        free = ("server", "top_k", "policy", "teachers")
        stated = [k for k, value in self if k not in free and value != fields[k].default]
        if self.policy and self.server is not None:
            raise ValueError("policy = true excludes the table server: a teacher is one of them")
        if self.policy and stated:
            raise ValueError(f"{stated[0]} has no effect with policy = true: no model is loaded")
        if self.server is not None and stated:
            raise ValueError(
                f"{stated[0]} has no effect with the table server: the ranks load no reference"
            )
        return self

    @model_validator(mode="after")
    def _has_one_teacher_each(self) -> Self:
        teacher_by_environment: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            for environment in teacher.environments:
                other = teacher_by_environment.setdefault(environment, name)
                if other != name:
                    raise ValueError(
                        f"teachers {other} and {name} both have the environment {environment}: it "
                        "has one teacher"
                    )
        models: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            model = teacher.model_dump_json(exclude={"environments"})
            other = models.setdefault(model, name)
            if other != name:
                raise ValueError(
                    f"teachers {other} and {name} are the same model: name the environments of "
                    "both in one of them"
                )
        return self


def teacher_setting(name: str) -> str:
    """Returns the name of a teacher's table, which is also that of its role."""
    return f"reference.teachers.{name}"


class CriticSection(Section):
    """The model that estimates the expected return, for the advantages `gae` and `turn_gae`.

    Its body starts with the weights in `path`, its head with random weights from `run.seed`. It has
    the policy's mini-batches, the learner's weight decay, bound of gradients and optimizer, and,
    without a table `parallel` like the reference's, the policy's layout.
    """

    # Hugging Face folder of its body, by default `model.path`.
    path: Path | None = None
    # Constant learning rate.
    learning_rate: float = Field(gt=0)
    # First steps, which train the critic alone.
    warmup_steps: int = Field(0, ge=0)
    # Distance from its old value beyond which a value lowers its loss no further. 0 means no bound.
    value_clip: float = Field(0.2, ge=0)
    # A table of its own, below.
    parallel: RoleParallelSection | None = None


RoleSection: TypeAlias = ReferenceSection | TeacherSection | CriticSection


def in_place_of(learner: LearnerSection, role: RoleSection) -> LearnerSection:
    """Returns the learner's settings, with the role's layout, if any, in place of the learner's.

    Layers that the learner's settings assign to pipeline stages do not fit other stages. Experts
    are split as the learner's are, and stages are not virtual.
    """
    if role.parallel is None:
        return learner
    parallel = ParallelSection(**role.parallel.model_dump(), etp=learner.parallel.etp)
    transformer = learner.transformer
    if (parallel.pp, parallel.vpp) != (learner.parallel.pp, learner.parallel.vpp):
        transformer = {k: value for k, value in transformer.items() if "pipeline" not in k}
    return learner.model_copy(update={"parallel": parallel, "transformer": transformer})


def renamed(problem: str, name: str, role: RoleSection) -> str:
    """Returns `problem`, a message about settings of `in_place_of`, with the role's names for them.

    For example, `learner.parallel` becomes `critic.parallel` if `name` is "critic" and `role` has
    that table, which has no `etp`.
    """
    if role.parallel is not None:
        problem = re.sub(r"\blearner\.parallel\b(?!\.etp)", f"{name}.parallel", problem)
    return re.sub(r"\bmodel\.path\b", f"{name}.path", problem) if role.path else problem
