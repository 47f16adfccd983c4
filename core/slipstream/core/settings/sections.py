"""The sections of a run's settings, one frozen model each. A setting's name ends in its unit."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, model_validator
from slipstream.core import extension
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.measurement_sections import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    PlayedSection,
)
from slipstream.core.settings.section import (
    Address,
    ElementType,
    Fixed,
    Growing,
    Positive,
    Section,
    Silence,
    check_one_of,
)
from slipstream.core.template_values import TemplateValues
from slipstream.v1 import fleet_pb2


def _check_storage(url: str) -> str:
    # fsspec joins the URLs of a chain by two colons.
    links = [urlsplit(link) for link in url.split("::")]
    if any("@" in link.netloc or link.query or link.fragment for link in links):
        # The value is not shown: it may hold a password.
        raise ValueError(
            "a storage URL has no user, password, query or fragment: credentials come from the "
            "environment"
        )
    return url


StorageUrl = Annotated[str, AfterValidator(_check_storage)]


BUILT_IN_TRANSPORTS = ("auto", "gloo", "nccl", "ipc")
TransportName = Annotated[
    str,
    check_one_of(BUILT_IN_TRANSPORTS, extension.transports),
    Field(json_schema_extra={"enum": [*BUILT_IN_TRANSPORTS]}),
]


class WeightsSection(Section):
    """The transport of new weights to the rollout servers."""

    # `nccl` goes between GPUs, `ipc` within a host, also on a shared GPU, and `gloo` over TCP.
    # `auto` is gloo if any part computes on a CPU, ipc on a shared GPU, else nccl.
    transport: TransportName = "auto"
    # Size at which a bucket is closed, at least that of the largest tensor.
    bucket_mib: Positive = 64
    # Folder or fsspec URL, such as s3://bucket/prefix, from which all servers of the run fetch
    # their weights while they serve, for slow links. Each process may name it differently.
    storage_url: StorageUrl | None = None
    # Limit of writing a version to storage and of fetching one.
    storage_deadline_s: Silence = 600.0
    # Limit of one bucket, and of the trainer's wait for a slow server.
    bucket_deadline_s: float = Field(2.0, ge=0.1)
    # Limit of preparing, of joining the communicator and of loading received weights.
    join_deadline_s: Silence = 20.0
    # Prove every n-th publish, and the first, by the log-probabilities of a probe besides digests.
    verify_every: Positive = 10


# Most replies of an episode where `max_turns` is 0. One that never ends is stopped by the limits of
# tokens, mostly, and by this.
MAX_TURNS = 256


# The values with which no token is left out.
_NEUTRAL: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class SamplingSection(Section):
    """Sampling of replies, and limits of an episode's length."""

    # Temperature of sampling and of the learner's logits, unless an environment has [its
    # own](algorithms.md#by-environment). Replies that an environment gives are trained at 1.
    temperature: Annotated[float, Fixed("recorded replies were sampled with it")] = Field(
        1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE
    )
    # Sampling uses the smallest set of tokens with this probability. The learner's policy is [over
    # the same set](algorithms.md#a-part-of-the-vocabulary).
    top_p: float = Field(1.0, gt=0, le=1)
    # Sampling uses this many of the most probable tokens, or all with 0. See `top_p`.
    top_k: int = Field(0, ge=0)
    # Sampling uses tokens with at least this part of the largest probability. See `top_p`.
    min_p: float = Field(0.0, ge=0, le=1)
    # Most sampled tokens of a reply.
    max_reply_tokens: int = Field(3072, ge=1, le=1 << 20)
    # Most replies of an episode. 0 means 256.
    max_turns: int = Field(0, ge=0, le=65536)
    # Most tokens, sampled or not, of an episode and of each of its branches.
    max_episode_tokens: Positive = 4096
    # Most tokens of all branches of an episode. 0 means `max_episode_tokens`.
    max_total_tokens: int = Field(0, ge=0)
    # Most branches of an episode, an agent's conversations with the model.
    max_branches: int = Field(16, ge=1, le=256)
    # Most tokens before the first reply, by default one less than `max_episode_tokens`. Prompts are
    # never cut: a task with a longer one is set aside.
    max_prompt_tokens: Positive | None = None
    # Token ids at which a reply ends, besides those of model and chat template: the start of a run
    # [names all](guides/environments.md#ends-of-a-reply). They are trained.
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), max_length=4096)
    # Texts at which a reply ends, behind the token that completes one. `stop_token_ids` costs less,
    # and is in exports.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=1024)
    # Most images of an episode, for models with vision. An episode with more fails.
    max_images: int = Field(0, ge=0, le=64)
    # Most bytes of an encoded image. A lease reserves `max_images` of them in the queue.
    max_image_bytes: int = Field(262144, ge=1, le=16777216)

    @property
    def cuts(self) -> dict[str, tuple[float, float]]:
        """The settings that leave tokens out of the distribution: name -> its value, that of none.

        The engine's log-probabilities are then those of a part of the vocabulary.
        """
        values = {name: (getattr(self, name), _NEUTRAL[name]) for name in _NEUTRAL}
        return {f"sampling.{name}": pair for name, pair in values.items() if pair[0] != pair[1]}

    @property
    def total_tokens(self) -> int:
        return self.max_total_tokens or self.max_episode_tokens

    def to_pb(self) -> fleet_pb2.SamplingSettings:
        """Returns these settings as a message, whose fields have the settings' names.

        The other fields stay unset: an environment, `debug` or a client's own loop sets them.
        """
        fields = type(self).model_fields
        names = fleet_pb2.SamplingSettings.DESCRIPTOR.fields_by_name
        values: dict[str, Any] = {name: getattr(self, name) for name in names if name in fields}
        return fleet_pb2.SamplingSettings(**values)


QueueEnd: TypeAlias = Literal["controller", "rollout_server"]


class QueueUserSection(Section):
    """The Redis user of one end of the queue."""

    # Name of the user, with the rights that [security](security.md) lists.
    user: Annotated[str, Field(min_length=1)]
    # File with the password.
    password_file: Path


# Form of a URL. A password with one of /?# in it would be cut in two, and shown as host or path.
_REDIS_URL = re.compile(
    r"rediss?://([^/?#]*@)?(\[[\da-fA-F:.]+\]|[^/?#@:\[\]]+)(:\d{1,5})?(/\d*)?(\?[^#@]*)?"
    r"|unix://([^/?#]*@)?/[^?#]*(\?[^#]*)?"
)


# The kinds that no extension must add, and those that the settings' page shows.
QueueKind = Annotated[
    str,
    check_one_of(extension.BUILT_IN_QUEUES, extension.queues),
    Field(json_schema_extra={"enum": ["grpc", "redis"]}),
]


class QueueSection(Section):
    """The queue in which finished trajectories wait for the journal."""

    # `grpc` keeps trajectories in the rollout servers' memory, `redis` on the disk of Redis or
    # Valkey. With `redis_url` the kind is `redis`.
    kind: QueueKind = "grpc"
    # URL of a Redis or Valkey server from 7.0 on, with redis://, rediss:// or unix://.
    redis_url: str | None = None
    # A table of its own, below: the controller's user.
    controller: QueueUserSection | None = None
    # A table of its own, below: the rollout servers' user.
    rollout_server: QueueUserSection | None = None
    # Most bytes that wait in the queue of each server (grpc) or of all (redis), and that all leases
    # reserve.
    max_bytes: Positive = 256 << 20

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, table: object) -> object:
        if isinstance(table, dict) and table.get("redis_url") is not None:
            return {"kind": "redis", **table}
        return table

    def user_of(self, end: QueueEnd) -> QueueUserSection | None:
        """Returns the Redis user of one end of the queue, or None if the settings name none."""
        return self.controller if end == "controller" else self.rollout_server

    @model_validator(mode="after")
    def _url(self) -> Self:
        if self.redis_url is None and self.kind == "redis":
            raise ValueError(
                "kind = 'redis' needs redis_url, the address of a Redis or Valkey server from 7.0 "
                "on that you start, such as redis://127.0.0.1:6379/0"
            )
        if self.redis_url is not None and self.kind != "redis":
            raise ValueError(
                f"redis_url is for kind = 'redis', and kind is {self.kind!r}: leave one out"
            )
        if self.redis_url is not None and not _REDIS_URL.fullmatch(self.redis_url):
            # The URL is not shown: it may hold a password.
            raise ValueError(
                "redis_url must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH, "
                "with USER:PASSWORD@ before the host if need be: a password with one of /?# in it "
                "is percent-encoded there, or stands in a file that the table of an end names"
            )
        for end in ("controller", "rollout_server"):
            if self.user_of(end) is not None and self.redis_url is None:
                raise ValueError(f"the table {end} needs redis_url")
            if self.user_of(end) is not None and "@" in urlsplit(self.redis_url).netloc:
                raise ValueError(f"the table {end} names a user: leave the one in redis_url out")
        return self


class CheckpointSection(Section):
    """Checkpoints, from which a run continues after a crash, and starting weights."""

    # Steps between checkpoints, besides the one when the run ends. 0 means none at all.
    every_steps: int = Field(50, ge=0)
    # Number of newest checkpoints that are kept.
    keep_last: Positive = 2
    # Also keep checkpoints whose version is a multiple of this, which is one of `every_steps`. 0
    # keeps no others.
    keep_every: int = Field(0, ge=0)
    # Whether batches in `journal/batches` stay that no resume from the `keep_last` newest
    # checkpoints needs. Without them a run cannot be replayed, and is verified in part.
    keep_batches: bool = True
    # Steps between Hugging Face folders, which are written to `RUN/exports` beside training, from
    # main memory of rank 0. 0 writes none.
    export_every: int = Field(0, ge=0)
    # Number of versions whose folders are kept, the newest ones.
    keep_exports: Positive = 3
    # Folder of Megatron's checkpoint files (torch_dist) to start from. `model.path` still gives
    # shape and tokenizer.
    load: Annotated[Path | None, Fixed("the run began with these weights")] = None

    @model_validator(mode="after")
    def _saved(self) -> Self:
        if self.keep_every and (not self.every_steps or self.keep_every % self.every_steps):
            raise ValueError(
                f"keep_every must be a multiple of every_steps, got {self.keep_every} and "
                f"{self.every_steps}: other versions are not saved"
            )
        if not (self.keep_batches or self.every_steps):
            raise ValueError(
                "keep_batches = false needs checkpoints, and every_steps is 0: without one a run "
                "begins again with its first batch"
            )
        return self


RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class RunSection(Section):
    """Name, length and folder of the run."""

    # Name of the run and of its folder.
    name: Annotated[str, Field(pattern=RUN_NAME, max_length=100)]
    # Id of the run, which every call to its controller names. The command that starts the
    # controller chooses it.
    id: Annotated[str, Field(pattern=RUN_NAME, max_length=128)] | None = None
    # Number of training steps, which is also the last version.
    steps: Annotated[Positive, Growing("steps up to the old last one may be recorded")]
    # Folder that holds the run's folder.
    dir: Path = Path("runs")
    # Seed of the trainer, of the order of tasks and of their seeds. The engine draws its own.
    seed: Annotated[int, Fixed("it decides the order of the tasks")] = Field(0, ge=0)
    # If the folder holds this run already, `auto` continues it and `never` refuses. `must` refuses
    # if there is none. `changed` is `must` for a run whose tokenizer, first weights or functions of
    # your own have changed; with other functions it can no longer be replayed.
    resume: Literal["auto", "never", "must", "changed"] = "auto"
    # Whether an environment that `slipstream check` refuses ends the run before it starts, or is
    # told.
    audit: Literal["refuse", "tell"] = "refuse"


class ModelSection(Section):
    """The model, a Hugging Face folder with its tokenizer."""

    # Hugging Face folder with config.json, safetensors and tokenizer, or OWNER/NAME[@REVISION] on
    # the hub.
    path: Annotated[Path, Fixed("the weights are those of this model")]
    # Element type of the learner's parameters and of the engine. float16 holds numbers below 65504.
    dtype: Annotated[ElementType, Fixed("the optimizer's state has this precision")] = "bfloat16"


class EnvironmentSection(PlayedSection):
    """One environment whose episodes are trained on."""

    # Share of the groups of each batch relative to the other environments. Of leases it has at most
    # twice that share, where groups are filtered or fail.
    weight: float = Field(1.0, gt=0)


# Longest time between two reports of a rollout server in a small fleet.
MAX_HEARTBEAT_S = 0.5


class ControllerSection(Section):
    """The controller, to whose address all other parts connect."""

    # Address of the controller. Off loopback it needs TLS and a token. With port 0 `slipstream run`
    # takes a free port and writes the address to `controller.address` in the run's folder. Parts
    # that are started separately need a port.
    address: Address = "127.0.0.1:0"
    # Silence after which a rollout server counts as dead, while the controller itself runs. Servers
    # report after a tenth of it or 0.5 s, and less often from the 65th on.
    heartbeat_timeout_s: Silence = 5.0
    # Attempts at an episode before its group goes on without it.
    max_attempts: Positive = 3
    # Serving time in which some episode of a lease must end. The group otherwise goes elsewhere,
    # which counts as an attempt.
    lease_timeout_s: Silence = 3600.0
    # An environment is suspended when this many groups in a row, by their leases, were set aside.
    max_failed_groups: Positive = 32
    # Batches in a row that may be set aside because they cannot be trained. The next one fails the
    # run.
    max_set_aside_batches: int = Field(3, ge=0)
    # The run stops after this time of serving without a step, an ended episode or work of the
    # trainer, and this long after a publish's deadline. Cancelled episodes and failures of engines,
    # connections and `reference.server` do not count as ended. While several servers serve, all
    # leases are taken back first and given to others, which have this time too. The run also stops
    # after this time without a rollout server; the first one has `rollout_server.start_timeout_s`
    # more.
    stall_timeout_s: Silence = 600.0
    # Steps between samples of trajectories, which are written as text.
    sample_every_steps: Positive = 10
    # Use of a GPU that learner and servers share. With `pause` engines rest during training, with
    # `sleep` each also gives memory back while the other computes. `auto` is pause on such a GPU,
    # and off elsewhere.
    turns: Literal["auto", "off", "pause", "sleep"] = "auto"
    # Whether a client decides what is sampled and trained, call by call: `slipstream tinker`. The
    # run then has no environments.
    client_loop: bool = False

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two reports of a rollout server in a small fleet."""
        return min(MAX_HEARTBEAT_S, self.heartbeat_timeout_s / 10)


class RoleParallelSection(Section):
    """Sizes of Megatron's parallel groups. The remaining ranks are data parallel."""

    # Tensor parallel ranks, which share each matrix.
    tp: Positive = 1
    # Pipeline stages.
    pp: Positive = 1
    # Context parallel ranks, which share each sequence.
    cp: Positive = 1
    # Expert parallel ranks, which share the experts, independent of tp and cp.
    ep: Positive = 1


class ParallelSection(RoleParallelSection):
    """Sizes of Megatron's parallel groups. The remaining ranks are data parallel."""

    # Ranks that share each expert's matrices, by default tp.
    etp: Positive | None = None
    # Virtual pipeline stages of each rank.
    vpp: Positive | None = None


class OffloadSection(Section):
    """State that moves to the host's memory while the trainer does not use it."""

    # Parameters, between steps except for export and probes.
    parameters: bool = False
    # Gradients, between steps. They are dropped, not copied.
    gradients: bool = False
    # Optimizer state, except in the optimizer's step.
    optimizer: bool = False

    @property
    def gives_memory_back(self) -> bool:
        return self.gradients and self.optimizer


# Share of a GPU's memory that a micro batch's logits may take. If they would take more, the
# backward pass computes them again in chunks.
KEPT_LOGITS_SHARE = 0.12


class LearnerSection(Section):
    """The trainer ranks."""

    # Number of ranks on all nodes.
    world_size: Positive = 1
    # Number of ranks on each node, by default all.
    ranks_per_node: Positive | None = None
    # Host of node 0, which sends weights, and a free port there, where ranks meet. One node may
    # have port 0.
    master: Address = "127.0.0.1:0"
    # Tokens of a packed micro batch on each context parallel rank.
    micro_batch_tokens: Positive = 4096
    # Shortest [shared prefix](internals/trainer.md#shared-prefixes) that is computed once in a
    # micro batch. 0 means never.
    shared_prefix_tokens: int = Field(32, ge=0)
    # GPUs of the ranks on a machine, as in CUDA_VISIBLE_DEVICES. By default the first ones.
    devices: tuple[int | str, ...] | None = None
    # CPU threads of each rank. 0 means all.
    threads: int = Field(1, ge=0)
    # How GPUs of compute capability 8.9 or above compute linear layers of a dense model in
    # [FP8](internals/trainer.md#fp8), with a scale for each block of 128 numbers (`blockwise`) or
    # for each matrix (`tensorwise`). Weights, gradients and optimizer keep their types.
    fp8: Literal["off", "blockwise", "tensorwise"] = "off"
    # Decoupled weight decay. Norms and biases have none.
    weight_decay: float = Field(0.0, ge=0)
    # Largest gradient norm. 0 means no limit.
    grad_clip: float = Field(1.0, ge=0)
    # A table of its own, below.
    parallel: ParallelSection = ParallelSection()
    # A table of its own, below.
    offload: OffloadSection = OffloadSection()
    # Passed by name to Megatron's DistributedDataParallelConfig. `use_distributed_optimizer`, which
    # splits the optimizer's state over the data and context parallel ranks, is by default true with
    # several of them and Adam.
    ddp: dict[str, JsonValue] = {}
    # Passed by name to Megatron's OptimizerConfig. `adam_beta1`, `adam_beta2` and `adam_eps` are by
    # default 0.9, 0.95 and 1e-8. `optimizer` is "adam", "sgd" or
    # ["muon"](guides/parallelism.md#muon).
    optimizer: dict[str, JsonValue] = {}
    # Passed by name to the model provider. `sequence_parallel`, which splits the tokens of norms
    # and dropout over the tensor parallel ranks, is by default true with several of them.
    transformer: dict[str, JsonValue] = {}
    # Write the trained model as a Hugging Face folder at the end, unless the run failed.
    export_final: bool = True
    # Silence of a rank, in a collective or while a disk moves no byte, after which the trainer
    # stops.
    timeout_s: Silence = 600.0

    @property
    def host(self) -> str:
        return address_parts(self.master)[0]

    @property
    def use_distributed_optimizer(self) -> bool:
        """Whether the optimizer's state is split over the data and context parallel ranks."""
        has_replicas = self.world_size > self.parallel.tp * self.parallel.pp
        splits = has_replicas and self.optimizer.get("optimizer", "adam") == "adam"
        return bool(self.ddp.get("use_distributed_optimizer", splits))

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.transformer.get("sequence_parallel", self.parallel.tp > 1))

    @property
    def computes_in_fp8(self) -> bool:
        """Whether linear layers compute in FP8, so that probabilities deviate from engines'."""
        return self.fp8 != "off" or bool(self.transformer.get("fp8"))

    @property
    def plans_recompute(self) -> bool:
        """Whether the trainer, and not the user, chooses the activations that are recomputed."""
        by_hand = ("recompute_granularity", "cpu_offloading")
        return not any(map(self.transformer.get, by_hand))


Quantization = Literal["off", "fp8_per_channel"]
# Types of a KV cache that has all bits of the model's type.
_EXACT_CACHES = ("auto", "float16", "bfloat16")


# Without a path, which would hide the routes of control, and without credentials.
EngineUrl = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+/?$")]


class RolloutServerSection(Section):
    """A rollout server and its vLLM engine."""

    # Number of servers that `slipstream run` starts. Without it a run on several GPUs
    # [plans it](guides/gpus.md#what-a-run-makes-of-several-gpus), and a second one may sample on
    # the GPU of the only trainer rank.
    count: Positive = 1
    # Most episodes at one time on a server. One on a GPU that the learner uses too has 5/16 of them
    # where others have their own.
    max_episodes: Positive = 64
    # vLLM workers that share each matrix of one engine.
    tensor_parallel_size: Positive = 1
    # [Stages](guides/parallelism.md#stages-of-an-engine) of one engine, each with a part of the
    # layers and `tensor_parallel_size` workers.
    pipeline_parallel_size: Positive = 1
    # GPUs of the servers on a machine, by default those after the learner's or the only one.
    devices: tuple[int | str, ...] | None = None
    # The engine's share of a GPU's memory. On a learner's GPU the default is 0.4, or 0.3 where
    # other servers have their own, divided by the servers there.
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    # CPU threads of the engine. 0 means all.
    threads: int = Field(1, ge=0)
    # Use neither torch.compile nor CUDA graphs. By default only on CPUs, where false needs a C++
    # compiler.
    enforce_eager: bool | None = None
    # Compute the context of running replies again with new weights. If false, they keep the old
    # one.
    recompute_context: bool = True
    # vLLM's parser of tool calls, such as hermes. Tools need it.
    tool_parser: str | None = None
    # vLLM's parser of reasoning, such as qwen3. Without it, judges go by marks such as </think>.
    reasoning_parser: str | None = None
    # File of a chat template in place of the tokenizer's.
    chat_template: Path | None = None
    # Passed by name to the chat template, behind those of an environment and of an agent's request.
    chat_template_kwargs: TemplateValues = {}
    # `fp8_per_channel` keeps linear layers in float8 with a scale for each row, for GPUs of compute
    # capability 8.9.
    quantization: Quantization = "off"
    # Passed by name to vLLM's AsyncEngineArgs.
    engine: dict[str, JsonValue] = {}
    # URL of a vLLM server that [samples in place of an engine of the server's
    # own](guides/engine_at_an_address.md), such as http://127.0.0.1:8000.
    engine_url: EngineUrl | None = None
    # File with that server's key, its `--api-key`.
    engine_token_file: Path | None = None
    # Time for running episodes to end when the server is told to leave. The rest runs elsewhere.
    drain_timeout_s: float = Field(5.0, ge=0)
    # Limit of the engine's start.
    start_timeout_s: Silence = 600.0
    # Memory at which an environment worker with its children is ended, by default half of the
    # machine's or container's.
    environment_memory_gib: float | None = Field(None, gt=0)
    # Most processes of an environment worker with its children, beyond which it is ended.
    environment_processes: Positive = 1000

    @model_validator(mode="after")
    def _token_has_a_receiver(self) -> Self:
        if self.engine_token_file is not None and self.engine_url is None:
            raise ValueError("engine_token_file needs engine_url, the server that it opens")
        return self

    @property
    def num_workers(self) -> int:
        """The number of vLLM workers of one engine, each of which has a GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def drafts(self) -> bool:
        return self.engine.get("speculative_config") is not None

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.engine.get("enable_prefix_caching", True))

    @property
    def computes_in_fp8(self) -> bool:
        """Whether weights or KV cache have FP8 or fewer bits, so that probabilities deviate."""
        cache = str(self.engine.get("kv_cache_dtype", "auto")).lower()
        return self.quantization != "off" or cache not in _EXACT_CACHES

    def is_eager(self, *, on_cpu: bool) -> bool:
        """Whether the engine runs eagerly, which by default it does on CPUs only."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager


class SecuritySection(Section):
    """TLS and the token. Addresses other than loopback need both."""

    # PEM file of the certificate that this end shows, the service's or a caller's. It needs
    # `tls_key`.
    tls_certificate: Path | None = None
    # PEM file of its key.
    tls_key: Path | None = None
    # PEM file of the authority by which callers verify the controller. By default its certificate.
    tls_ca: Path | None = None
    # PEM file of the authority whose certificates callers must show. By default they need none.
    tls_client_ca: Path | None = None
    # File with a secret of at least 32 characters that callers send, the run's or the host's
    # role's. By default the file `token` of the run's folder, which a run on loopback makes.
    token_file: Path | None = None
    # File with the token of Prometheus, which opens /metrics alone.
    metrics_token_file: Path | None = None
    # Modules, with all below them, whose environments clients may submit to every rollout host. By
    # default any while the controller is on loopback, else those of the run's environments, but
    # never slipstream.environments.command and frameworks, whose arguments may name any program.
    # Clients choose the arguments.
    submitted_modules: tuple[str, ...] | None = None
    # Folders in which rollout hosts may look for the modules of submitted environments, and
    # interpreters that these may name, beside those of the run itself.
    submitted_paths: tuple[Path, ...] = ()

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together, only one is set")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate: without TLS nobody shows one")
        return self
