"""The sections of a run's settings, one frozen model each. Names end in units."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, model_validator
from slipstream.core.settings.environment_algorithm import EnvironmentAlgorithmSection
from slipstream.core.settings.measurement_sections import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    PlayedSection,
)
from slipstream.core.settings.section import Address, ElementType, Host, Positive, Section, Silence
from slipstream.core.template_values import TemplateValues
from slipstream.v1 import fleet_pb2

DeltaSetting = Literal["off", "gpu", "host"]
StageSetting = Literal["auto"] | bool


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


class WeightsSection(Section):
    """The transport of new weights to the rollout servers."""

    # nccl: between GPUs; ipc: within one host, also on a shared GPU; gloo: TCP, from main memory.
    # auto: gloo if any part computes on a CPU, ipc on a shared GPU, else nccl.
    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    # Address of trainer rank 0's machine that the transport of weights uses.
    host: Host = "127.0.0.1"
    # Size at which a bucket is closed; the size of the largest tensor, if that is more.
    bucket_mib: Positive = 64
    # Engines receive new weights next to those that serve, and requests wait only for the copies.
    # It takes the memory of the weights on the wire, on a GPU out of `gpu_memory_utilization`.
    # auto: while requests run, if there is room; on a GPU for up to a sixth of that share.
    stage_on_server: StageSetting = "auto"
    # Send only the elements that changed since the last publish, if that is at most half as long.
    # The trainer keeps the published weights for it, gpu: next to its own weights, with an eighth
    # more; host: in main memory, which takes longer. An engine's worker takes memory for one
    # bucket.
    delta: DeltaSetting = "off"
    # Folder, or URL of fsspec such as s3://bucket/prefix, into which the trainer writes versions
    # for servers with rollout_server.weights_from = "storage". A server may have its own name for
    # it. Without it no server takes weights from storage.
    storage_url: StorageUrl | None = None
    # Limit of writing a version to storage, and of fetching a version from there.
    storage_deadline_s: Silence = 600.0
    # Limit of one bucket; the trainer also waits this long for a server that is not ready, or
    # loads.
    bucket_deadline_s: float = Field(2.0, ge=0.1)
    # Limit of preparing, of joining the communicator and of loading the received weights.
    join_deadline_s: Silence = 20.0
    # Prove every n-th publish by the log-probabilities of a probe, besides its digests; the first
    # publish always has a probe.
    verify_every: Positive = 10


# Most replies of an episode where `max_turns` is 0. One that never ends is stopped by the limits of
# tokens, mostly, and by this.
MAX_TURNS = 256


class SamplingSection(Section):
    """Sampling of replies, and limits of an episode's length."""

    # Sampling temperature, by which the learner divides its logits too, but for replies that an
    # environment gives: these are trained at temperature 1. The bounds are vLLM's.
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    # Sampling uses the smallest set of tokens with this probability; the learner ignores it.
    top_p: float = Field(1.0, gt=0, le=1)
    # Sampling uses this many of the most probable tokens; the learner ignores it. 0: no limit.
    top_k: int = Field(0, ge=0)
    # Most sampled tokens of one reply.
    max_reply_tokens: Positive = 3072
    # Most replies of one episode; 0: 256. An environment ends its episodes, and so do the limits of
    # tokens.
    max_turns: int = Field(0, ge=0)
    # Most tokens of an episode, context and sampled. It bounds each branch of an agent's episode.
    max_episode_tokens: Positive = 4096
    # Most tokens of all branches of an episode together. 0: `max_episode_tokens`.
    max_total_tokens: int = Field(0, ge=0)
    # Most branches of an episode, the conversations that an agent has with the model.
    max_branches: int = Field(16, ge=1, le=256)
    # Most tokens of a task before the first reply; by default one less than max_episode_tokens.
    # Prompts are never cut.
    max_prompt_tokens: Positive | None = None
    # Treatment of a task with a longer prompt. skip: the task is set aside and counted, and another
    # task takes its place; refuse: the run fails and names the task.
    long_prompts: Literal["skip", "refuse"] = "skip"
    # Token ids besides the end-of-text token at which a reply ends, for example that of <|eom_id|>.
    # The token that ends a reply belongs to it, and is trained.
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # Texts at which a reply ends. The token that completes the first such text belongs to the
    # reply. Special tokens count as their text. Servers then detokenize all replies: prefer
    # stop_token_ids.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Most images of an episode. 0: an episode with an image fails. More need a model with vision.
    max_images: int = Field(0, ge=0, le=64)
    # Most bytes of an image, encoded. A lease reserves `max_images` of them in the queue.
    max_image_bytes: int = Field(262144, ge=1, le=16777216)

    @property
    def total_tokens(self) -> int:
        """Most tokens of an episode, all branches together."""
        return self.max_total_tokens or self.max_episode_tokens

    def to_pb(self) -> fleet_pb2.SamplingSettings:
        """Returns the wire form: each of its fields is the setting of the same name.

        The adapter is left out, since each environment has its own, and what `debug` has.
        """
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in fleet_pb2.SamplingSettings.DESCRIPTOR.fields_by_name
            if name not in ("adapter", "ignore_eos")
        }
        return fleet_pb2.SamplingSettings(**values)


QueueEnd: TypeAlias = Literal["controller", "rollout_server"]


class QueueUserSection(Section):
    """The user as which one end of the queue logs in to Redis, not the one in `redis_url`."""

    # Name of the user; docs/security.md has the rights that it needs.
    user: Annotated[str, Field(min_length=1)]
    # File with the user's password.
    password_file: Path


# Form of a URL. A password with one of /?# in it would be cut in two, and shown as host or path.
_REDIS_URL = re.compile(
    r"rediss?://([^/?#]*@)?(\[[\da-fA-F:.]+\]|[^/?#@:\[\]]+)(:\d{1,5})?(/\d*)?(\?[^#@]*)?"
    r"|unix://([^/?#]*@)?/[^?#]*(\?[^#]*)?"
)


class QueueSection(Section):
    """The queue in which finished trajectories wait for the journal."""

    # grpc: in the memory of the rollout servers; redis: on the disk of a Redis or Valkey server.
    kind: Literal["grpc", "redis"] = "grpc"
    # redis://, rediss:// or unix:// ; without it `slipstream run` starts a server.
    redis_url: str | None = None
    # File with the password, which is then left out of `redis_url`.
    redis_password_file: Path | None = None
    # A table of its own, below: the controller's user.
    controller: QueueUserSection | None = None
    # A table of its own, below: the rollout servers' user.
    rollout_server: QueueUserSection | None = None
    # Bytes that may wait in the queue: of each server (grpc), of all servers together (redis). When
    # it is full, servers wait. Leases of all servers together reserve no more than this.
    max_bytes: Positive = 256 << 20

    def user_of(self, end: QueueEnd) -> QueueUserSection | None:
        """Returns the table of one end."""
        return self.controller if end == "controller" else self.rollout_server

    @model_validator(mode="after")
    def _url(self) -> QueueSection:
        if self.redis_url is not None and not _REDIS_URL.fullmatch(self.redis_url):
            # The URL is not shown: it may hold a password.
            raise ValueError(
                "redis_url must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH, "
                "with USER:PASSWORD@ before the host if need be: a password with one of /?# in it "
                "is percent-encoded there, or stands in redis_password_file"
            )
        return self

    @model_validator(mode="after")
    def _users(self) -> QueueSection:
        tables = [end for end in ("controller", "rollout_server") if self.user_of(end) is not None]
        if not tables:
            return self
        if self.redis_url is None:
            raise ValueError(
                f"the table {tables[0]} needs redis_url: the embedded server makes its users itself"
            )
        if self.redis_password_file is not None or "@" in urlsplit(self.redis_url).netloc:
            raise ValueError(
                f"the table {tables[0]} names a user: leave redis_password_file out, "
                "and the user in redis_url"
            )
        return self


# The newest groups of a task whose rewards the journal's reader keeps.
MAX_WINDOW = 16


class CurriculumSection(Section):
    """The choice of an environment's next task by the mean rewards of the task's newest groups.

    Tasks are drawn in proportion to 4 p (1 - p), where p is the mean success of the task's newest
    groups; a task without a result counts as 1. Success runs from 0 at `failed_reward` to 1 at
    `solved_reward` of the environment's algorithm.

    Without this table each task comes once, in a seeded order, and then again. The controller
    journals each reward that the choice reads, so a run that goes on chooses as it would have.
    """

    # Number of newest groups of a task that count.
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 2
    # A group whose mean reward is this or less has failed: its success is 0.
    failed_reward: float = 0.0
    # Smallest value in place of 4 p (1 - p).
    floor: float = Field(0.05, ge=0.01, le=1)


class CheckpointSection(Section):
    """Checkpoints, from which a run continues after a crash, and starting weights."""

    # Write a checkpoint after every n-th step, and one when the run ends; 0: none at all.
    every_steps: int = Field(50, ge=0)
    # Keep the newest n checkpoints; older ones are removed when a newer one is complete.
    keep_last: Positive = 2
    # Also keep every checkpoint whose version is a multiple of n; 0: keep no others.
    keep_every: int = Field(0, ge=0)
    # Copy to main memory and write during training; if false, training waits for the write.
    asynchronous: bool = True
    # Start from these weights: a folder of Megatron's distributed checkpoint files (torch_dist) in
    # any layout, from a run's checkpoint or a conversion. `model.path` still gives shape and
    # tokenizer. Without it, start from the weights of `model.path`.
    load: Path | None = None
    # Keep the recorded batches that a checkpoint covers: `slipstream replay` needs all of them.
    keep_batches: bool = True


Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class RunSection(Section):
    """Name, length and folder of the run."""

    # Name of the run and of its folder.
    name: Annotated[str, Field(pattern=RUN_NAME, max_length=100)]
    # Number of training steps, and so the last version.
    steps: Positive
    # All files of the run are in `dir`/`name`.
    dir: Path = Path("runs")
    # Seed of the trainer and of the order and seeds of tasks. The engine draws its own seed at each
    # start.
    seed: int = Field(0, ge=0)
    # What to do when the folder already holds this run. auto: continue from its last checkpoint and
    # journal; never: refuse; must: refuse when there is nothing to continue from.
    resume: Literal["auto", "never", "must"] = "auto"
    # What to do when the run goes on and the source of one of its own functions is not what it was.
    # accept: such a run can no longer be replayed.
    changed_functions: Literal["refuse", "accept"] = "refuse"


class ModelSection(Section):
    """The model, a Hugging Face folder with its tokenizer."""

    # A folder with config.json, safetensors and a tokenizer, or OWNER/NAME of the Hugging Face hub,
    # maybe with @ and a commit, tag or branch. Its chat template may be a file of its own,
    # rollout_server.chat_template.
    path: Path
    # Element type of the learner's parameters and of the rollout engine. float16 has three
    # more bits of precision than bfloat16 and ends at 65504: the start refuses models that come
    # near it.
    dtype: ElementType = "bfloat16"


class EnvironmentSection(PlayedSection):
    """One environment whose episodes are trained on."""

    # Share of the trained groups, relative to the other environments' weights, with at most twice
    # that share of the leases.
    weight: float = Field(1.0, gt=0)
    # A table of its own, below.
    curriculum: CurriculumSection | None = None
    # A table of its own, below.
    algorithm: EnvironmentAlgorithmSection | None = None


class ControllerSection(Section):
    """The controller, to whose address all other parts connect."""

    # Address of the controller; addresses other than loopback need TLS and a token.
    address: Address = "127.0.0.1:7070"
    # Time between two reports of a rollout server. From the 65th on a server that joins reports
    # less often, at least three times in `heartbeat_timeout_s`.
    heartbeat_s: float = Field(0.5, ge=0.01)
    # Silence after which a rollout server counts as dead, without time in which the controller
    # itself did not run.
    heartbeat_timeout_s: Silence = 5.0
    # Attempts at an episode before its group goes on without it.
    max_attempts: Positive = 3
    # Share of a group that must finish, at least two members; it is trained with these, and else
    # set aside.
    min_group_share: float = Field(0.5, gt=0, le=1)
    # Time of serving in which some episode of a leased group must end; else the group is leased
    # elsewhere, which counts as an attempt.
    lease_timeout_s: Silence = 3600.0
    # An environment is suspended when this many of its newest groups, in the order of their leases,
    # were all set aside.
    max_failed_groups: Positive = 32
    # Consecutive batches that may be set aside because the trainer cannot train them; the next one
    # fails the run.
    max_set_aside_batches: int = Field(3, ge=0)
    # The run stops after this time of serving in which no step was made, no episode ended and the
    # trainer did nothing (micro batches, loading, saving, exporting). Cancelled episodes do not
    # count, nor failures of engines, connections and reference.server. The run also stops this long
    # after the deadline of a publish.
    stall_timeout_s: Silence = 600.0
    # The run stops when no rollout server was connected for this time; the first server has
    # rollout_server.start_timeout_s more.
    fleet_timeout_s: Silence = 600.0
    # Write some trajectories of every n-th step as text.
    sample_every_steps: Positive = 10
    # Use of a GPU that learner and rollout servers share. off: both compute at the same time;
    # pause: engines rest while the learner trains; sleep: they also give their memory back, and
    # the learner its own (learner.offload) while they generate.
    turns: Literal["off", "pause", "sleep"] = "off"


class ParallelSection(Section):
    """Sizes of Megatron's parallel groups; the remaining ranks are data parallel."""

    # Tensor parallel: ranks that share each matrix.
    tp: Positive = 1
    # Pipeline stages.
    pp: Positive = 1
    # Context parallel: ranks that share each sequence.
    cp: Positive = 1
    # Expert parallel: ranks over which the experts are spread, independent of tp and cp.
    ep: Positive = 1
    # Tensor parallel of experts: ranks that share each expert's matrices; by default tp.
    etp: Positive | None = None
    # Virtual pipeline stages of each pipeline rank.
    vpp: Positive | None = None
    # Split the tokens of norms and dropout over the tensor parallel ranks.
    sequence_parallel: bool = False


class OffloadSection(Section):
    """State that moves to the host's memory while the trainer does not use it."""

    # Parameters, between steps except for export and probes.
    parameters: bool = False
    # Gradients, between steps; they are dropped, not copied.
    gradients: bool = False
    # The optimizer's state, always except in the optimizer's step.
    optimizer: bool = False

    @property
    def gives_memory_back(self) -> bool:
        """Whether the largest parts leave the device between steps."""
        return self.gradients and self.optimizer


class LearnerSection(Section):
    """The trainer ranks."""

    # Number of ranks over all nodes.
    world_size: Positive = 1
    # Number of ranks on each node; by default all of them.
    ranks_per_node: Positive | None = None
    # Address at which the ranks meet: host of node 0 and a free port there (0: any, on one node).
    master: Address = "127.0.0.1:0"
    # Tokens of one packed micro batch, on each of the context parallel ranks that share it.
    micro_batch_tokens: Positive = 4096
    # Shortest common beginning, in tokens, that is computed once for the sequences of a micro
    # batch, such as the prompt of a group; 0: each sequence computes its own.
    shared_prefix_tokens: int = Field(32, ge=0)
    # GPUs of the ranks on one machine, by number or UUID as in CUDA_VISIBLE_DEVICES; else the
    # first GPUs.
    devices: tuple[int | str, ...] | None = None
    # Largest share of its GPU's memory that torch may hold in a rank.
    gpu_memory_fraction: float | None = Field(None, gt=0, le=1)
    # Layers that compute their activations again in the backward pass. off: those of
    # `learner.transformer`, by default none; auto: as many as the memory of the GPUs needs,
    # measured in the first training pass. On a CPU none.
    recompute: Literal["off", "auto"] = "off"
    # CPU threads of each rank; 0: all.
    threads: int = Field(1, ge=0)
    # Decoupled weight decay; norms and biases have none.
    weight_decay: float = Field(0.0, ge=0)
    # Betas of AdamW.
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    # Epsilon of AdamW.
    adam_eps: float = Field(1e-8, gt=0)
    # Largest gradient norm; 0: no limit.
    grad_clip: float = Field(1.0, ge=0)
    # How weights in bfloat16 are made of the optimizer's float32 masters after an update. nearest:
    # one moves once its updates add up to half the distance to its neighbour; stochastic: up or
    # down, each as often as it is near, so that served weights follow small learning rates.
    rounding: Literal["nearest", "stochastic"] = "nearest"
    # Split the optimizer's state over the data parallel ranks.
    use_distributed_optimizer: bool = False
    # A table of its own, below.
    parallel: ParallelSection = ParallelSection()
    # A table of its own, below.
    offload: OffloadSection = OffloadSection()
    # Passed by name to Megatron's DistributedDataParallelConfig, OptimizerConfig and model
    # provider.
    ddp: dict[str, JsonValue] = {}
    # See `ddp`.
    optimizer: dict[str, JsonValue] = {}
    # See `ddp`.
    transformer: dict[str, JsonValue] = {}
    # Write the trained model as a Hugging Face folder when the run ends, unless it has failed.
    export_final: bool = True
    # Silence of a rank after which the trainer stops: the limit of one collective, and of a disk
    # that moves no byte of a checkpoint.
    timeout_s: Silence = 600.0


Quantization = Literal["off", "fp8_per_channel"]
# Most episodes of an engine that drafts: with more under way drafts do not pay.
MOST_DRAFTED_EPISODES = 256


class RolloutServerSection(Section):
    """A rollout server and its vLLM engine."""

    # Number of servers that `slipstream run` starts.
    count: Positive = 1
    # Most episodes that run at the same time on a server.
    max_episodes: Positive = 64
    # The same for a slower server, on a GPU that the learner uses too. By default max_episodes.
    shared_max_episodes: Positive | None = None
    # vLLM workers of one engine.
    tensor_parallel_size: Positive = 1
    # GPUs of the servers on one machine, `tensor_parallel_size` for each, by number or UUID as in
    # CUDA_VISIBLE_DEVICES; else the GPUs after the learner's, or the only GPU.
    devices: tuple[int | str, ...] | None = None
    # Share of a GPU's memory for the engine; on a CPU `kv_cache_gib` counts. If left out on a GPU
    # that the learner uses too: 0.4, divided by the number of servers there.
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    # Memory of the engine's KV cache on a CPU.
    kv_cache_gib: Positive = 1
    # CPU threads of the engine; 0: all.
    threads: int = Field(1, ge=0)
    # Use neither torch.compile nor CUDA graphs. Default: false on GPUs and true on CPUs, where the
    # engine then starts sooner. False on CPUs needs a C++ compiler.
    enforce_eager: bool | None = None
    # Draft tokens and sample several in one step; replies are distributed as without. shared:
    # drafts from the prompt, the group and earlier replies. Engines for more than 256 episodes make
    # none.
    drafts: Literal["off", "shared"] = "off"
    # Longest draft, in tokens. With many replies under way drafts are shorter.
    draft_tokens: int = Field(4, ge=1, le=16)
    # Cache prefixes. A cached prefix never serves a request of a newer version.
    enable_prefix_caching: bool = True
    # Compute the context of running replies again with new weights: each token is then exactly
    # what the weights of its version sample. False: replies continue on keys and values of older
    # weights.
    recompute_context: bool = True
    # vLLM's parser of the model's tool calls: hermes, llama3_json, mistral and so on. Tools need
    # it.
    tool_parser: str | None = None
    # vLLM's parser of the model's reasoning: qwen3, deepseek_r1 and so on. Without it reasoning is
    # part of the reply.
    reasoning_parser: str | None = None
    # File of a chat template in place of the tokenizer's, for agents and other environments.
    chat_template: Path | None = None
    # Passed by name to the chat template, such as `enable_thinking = false`. Those of an
    # environment come before them, those of an agent's request before both.
    chat_template_kwargs: TemplateValues = {}
    # trainer: new weights come from the trainer's ranks, over weights.transport. storage: the
    # server fetches them from weights.storage_url while it serves, for a server behind a slow link.
    weights_from: Literal["trainer", "storage"] = "trainer"
    # Precision of the engine's linear layers, under vLLM's name. fp8_per_channel: weights in
    # float8 with a scale for each row. Needs a GPU of compute capability 8.9; CPUs are slow.
    quantization: Quantization = "off"
    # Passed by name to vLLM's AsyncEngineArgs: max_num_batched_tokens, kv_cache_dtype,
    # compilation_config and so on.
    engine: dict[str, JsonValue] = {}
    # Time for running episodes to end when the server is told to leave (SIGTERM, `slipstream
    # drain`); then they run elsewhere.
    drain_timeout_s: float = Field(5.0, ge=0)
    # Limit of the engine's start.
    start_timeout_s: Silence = 600.0
    # Memory of an environment worker with its child processes; a worker that takes more is ended.
    # By default half of the machine's or the container's memory.
    environment_memory_gib: float | None = Field(None, gt=0)
    # Most processes of an environment worker with its child processes; one with more is ended.
    environment_processes: Positive = 1000

    @property
    def computes_in_fp8(self) -> bool:
        """Whether engines sample with other probabilities than the learner's, for FP8."""
        cache = str(self.engine.get("kv_cache_dtype", "auto")).lower()
        return self.quantization != "off" or cache.startswith("fp8")

    def is_eager(self, *, on_cpu: bool) -> bool:
        """Whether the engine compiles nothing, on a CPU or on GPUs."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager

    def has_graphs(self, *, on_cpu: bool) -> bool:
        """Whether the engine's steps are CUDA graphs."""
        return not (on_cpu or self.is_eager(on_cpu=on_cpu))


class SecuritySection(Section):
    """TLS and the token; addresses other than loopback need both."""

    # PEM file of the certificate that this end shows, needs `tls_key`: that of the service, on a
    # host without one that of a caller.
    tls_certificate: Path | None = None
    # PEM file of the certificate's key.
    tls_key: Path | None = None
    # PEM file of the authority by which callers verify the controller; else its certificate.
    tls_ca: Path | None = None
    # PEM file of the authority whose certificates callers must show; none need one without it.
    tls_client_ca: Path | None = None
    # File with a secret of at least 32 characters that every caller sends: the run's, or that of
    # the host's role.
    token_file: Path | None = None
    # File with another one, which Prometheus sends: it opens /metrics (tracking.prometheus) alone.
    metrics_token_file: Path | None = None
    # Modules of the environments that clients may submit, each with all below it. Such a class runs
    # on every rollout host. None: any module while the controller is on loopback, else only those
    # of the run's own environments.
    submitted_modules: tuple[str, ...] | None = None
    # Let torch's rendezvous and the transport of weights, which have neither TLS nor a token, use
    # addresses that are not private.
    allow_public_addresses: bool = False

    @model_validator(mode="after")
    def _pairs(self) -> SecuritySection:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together, only one is set")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate: without TLS nobody shows one")
        return self
