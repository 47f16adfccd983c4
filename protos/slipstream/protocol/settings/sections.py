"""The sections of a run's settings: one frozen model each. Units stand in the names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue, model_validator
from slipstream.protocol.settings.measurement_sections import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    ProfileSection,
)
from slipstream.protocol.settings.section import (
    Address,
    Host,
    Positive,
    Reference,
    Seconds,
    Section,
    Silence,
)

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class RunSection(Section):
    """What is run, for how long, and where its files lie."""

    # Also the name of the run's folder.
    name: Annotated[str, Field(pattern=RUN_NAME, max_length=100)]
    # Training steps, and so the last version.
    steps: Positive
    # Everything that the run makes lies in `dir`/`name`.
    dir: Path = Path("runs")
    # Of the order and seeds of tasks and of the trainer; the engine's is drawn anew at each start.
    seed: int = Field(0, ge=0)
    # When the folder holds this run already. auto: go on from its last checkpoint and its journal;
    # never: refuse. must: refuse when there is nothing to go on from.
    resume: Literal["auto", "never", "must"] = "auto"


class ModelSection(Section):
    """The model, a Hugging Face folder with its tokenizer."""

    # A folder with config.json, safetensors and a tokenizer with a chat template.
    path: Path
    # Element type of the learner's parameters and of the rollout engine.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Element type of the logits in both: float32, or "model" for dtype. Logits in bfloat16 are
    # rounded, differently in each, so that their log-probabilities lie further apart.
    head_dtype: Literal["float32", "model"] = "float32"


class EnvironmentSection(Section):
    """One environment whose episodes are trained on."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # "package.module:Class"; the controller's working directory is searched first.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Share of the trained groups.
    weight: float = Field(1.0, gt=0)
    # Limit of one reset or step.
    timeout_s: Seconds = 60.0
    # Worker processes beside each rollout server.
    num_workers: Positive = 1


class SamplingSection(Section):
    """How replies are sampled, and how long an episode may be."""

    # The learner divides its logits by it too. vLLM samples at no lower and no higher one.
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    # Sampling takes the smallest set of tokens of this probability; the learner does not know it.
    top_p: float = Field(1.0, gt=0, le=1)
    # Sampling takes so many of the most probable tokens; the learner does not know it. 0: no limit.
    top_k: int = Field(0, ge=0)
    # Sampled tokens of one reply.
    max_reply_tokens: Positive
    # Replies of one episode.
    max_turns: Positive = 1
    # All tokens of an episode, context and sampled.
    max_episode_tokens: Positive
    # Tokens of a task before the first reply; None: what leaves room for one token of it. Prompts
    # are never cut.
    max_prompt_tokens: Positive | None = None
    # What becomes of a task with a longer prompt. skip: it is set aside and counted, another one
    # takes its place; refuse: the run fails and names it.
    long_prompts: Literal["skip", "refuse"] = "skip"
    # Token ids beside the end-of-text token at which a reply ends: that of <|eom_id|>, say. The one
    # that ended it belongs to the reply, and is trained.
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # Texts at which a reply ends: with the token that completes the first of them, which belongs to
    # the reply, as do characters behind the text in it. Special tokens count as their text. Costs
    # the detokenization of all replies; what stop_token_ids can say is better said there.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Go on after the end-of-text token, up to the limits: for benchmarks.
    ignore_eos: bool = False


class ControllerSection(Section):
    """The controller: the one address that everything else connects to."""

    # Other addresses than loopback need TLS and a token.
    address: Address = "127.0.0.1:7070"
    # Time between two reports of a rollout server.
    heartbeat_s: float = Field(0.5, ge=0.01)
    # Silence after which a rollout server is taken for dead. Time in which the controller itself
    # stood still does not count.
    heartbeat_timeout_s: Silence = 5.0
    # Attempts of an episode before its task is set aside.
    max_attempts: Positive = 3
    # Time of serving in which some episode of a leased group must end; else the group is taken back
    # and goes on elsewhere, which counts as an attempt.
    lease_timeout_s: Silence = 3600.0
    # Groups in a row that may fail before their environment is suspended.
    max_failed_groups: Positive = 8
    # Batches in a row that are set aside because the trainer cannot train them; the next one fails
    # the run. 0: the first one does.
    max_set_aside_batches: int = Field(3, ge=0)
    # The run stops when no step was made, no episode ended and the trainer gave no sign of life in
    # so long a time of serving: while every server loads weights, is stale or gone the clock stands
    # still. A trainer gives signs of life with each micro batch, and while it loads, saves or
    # exports. Also so long after a publish should have ended that the trainer was told to send.
    stall_timeout_s: Silence = 600.0
    # The run stops when no rollout server was connected for so long; the first one has
    # rollout_server.start_timeout_s more.
    fleet_timeout_s: Silence = 600.0
    # Some trajectories of every n-th step are written out as text.
    sample_every_steps: Positive = 10


class ParallelSection(Section):
    """Sizes of Megatron's parallel groups; the rest of the world is data parallel."""

    # Tensor parallel: ranks that share each matrix.
    tp: Positive = 1
    # Pipeline stages.
    pp: Positive = 1
    # Context parallel: ranks that share each sequence.
    cp: Positive = 1
    # Expert parallel: ranks over which the experts of a mixture are spread, whatever tp and cp are.
    ep: Positive = 1
    # Tensor parallel of experts: ranks that share each expert's matrices; None: tp.
    etp: Positive | None = None
    # Virtual pipeline stages of each pipeline rank.
    vpp: Positive | None = None
    # Norms and dropout split the tokens over the tensor parallel ranks.
    sequence_parallel: bool = False


class OffloadSection(Section):
    """What leaves the device for the host's memory while the trainer does not work with it."""

    # Between steps, but for export and probes.
    parameters: bool = False
    # Between steps; they are not kept at all.
    gradients: bool = False
    # All the time but for the optimizer's step.
    optimizer: bool = False


class LearnerSection(Section):
    """The trainer ranks."""

    # Ranks over all nodes.
    world_size: Positive = 1
    # None: all of them.
    ranks_per_node: Positive | None = None
    # Where the ranks meet: host of node 0 and a free port there (0: any, on one node).
    master: Address = "127.0.0.1:0"
    # Tokens of one packed micro batch, on each of the context parallel ranks that share it.
    micro_batch_tokens: Positive = 4096
    # GPUs of the ranks that start on a machine, by number or UUID as in CUDA_VISIBLE_DEVICES; None:
    # the first ones.
    devices: tuple[int | str, ...] | None = None
    # Share of its GPU's memory that torch may hold in a rank, as a limit; None: no limit.
    gpu_memory_fraction: float | None = Field(None, gt=0, le=1)
    # Share of a rank's GPU memory that the logits of one micro batch's trained tokens may take.
    # Where they are more, the backward pass computes them a second time, in chunks.
    kept_logits_share: float = Field(0.08, ge=0, le=1)
    # CPU threads of each rank; 0: all.
    threads: int = Field(1, ge=0)
    # Decoupled; not for norms and biases.
    weight_decay: float = Field(0.0, ge=0)
    # Of AdamW.
    adam_betas: tuple[Decay, Decay] = (0.9, 0.95)
    # Of AdamW.
    adam_eps: float = Field(1e-8, gt=0)
    # Largest gradient norm; 0: no limit.
    grad_clip: float = Field(1.0, ge=0)
    # Split the optimizer's state over the data parallel ranks.
    use_distributed_optimizer: bool = False
    # A table of its own, below.
    parallel: ParallelSection = ParallelSection()
    # A table of its own, below.
    offload: OffloadSection = OffloadSection()
    # Passed by name to Megatron's DistributedDataParallelConfig, OptimizerConfig and model
    # provider.
    ddp: dict[str, JsonValue] = {}
    # As `ddp`.
    optimizer: dict[str, JsonValue] = {}
    # As `ddp`.
    transformer: dict[str, JsonValue] = {}
    # Dense bfloat16 TFLOP/s of one rank's device, for the metric mfu; None: known for A100, H100,
    # H200 and B200.
    peak_tflops: float | None = Field(None, gt=0)
    # A table of its own, below.
    profile: ProfileSection = ProfileSection()
    # Write the trained model as a Hugging Face folder at the end.
    export_final: bool = True
    # Restarts of all ranks when one has died, by the command that started them.
    max_restarts: int = Field(3, ge=0)
    # Silence of a rank after which the trainer stops: the limit of one collective, and of a disk
    # that neither takes nor gives a byte of a checkpoint.
    timeout_s: Silence = 600.0


class RolloutServerSection(Section):
    """A rollout server and its vLLM engine."""

    # Servers that `slipstream run` starts.
    count: Positive = 1
    # Episodes that run at one time.
    max_episodes: Positive = 64
    # vLLM workers of one engine.
    tensor_parallel_size: Positive = 1
    # GPUs of the servers that start on a machine, `tensor_parallel_size` for each, number or UUID
    # as in CUDA_VISIBLE_DEVICES; None: the ones behind the learner's, or the only one.
    devices: tuple[int | str, ...] | None = None
    # Share of a GPU's memory; on a CPU `kv_cache_gib` counts. Left out on a GPU that the learner
    # uses too: 0.4, divided by the servers there.
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    # Memory of the engine's KV cache on a CPU.
    kv_cache_gib: Positive = 1
    # CPU threads of the engine; 0: all.
    threads: int = Field(1, ge=0)
    # Neither torch.compile nor CUDA graphs. None: false on GPUs, and true on CPUs, where the engine
    # starts sooner without a compiler. False on CPUs needs a C++ compiler.
    enforce_eager: bool | None = None
    # Steps for which new prompts may wait for each other, so that most steps only go on with
    # replies and are one CUDA graph. They wait until there is one for every 32 replies under way.
    # 0: none waits. None: 32 on GPUs with CUDA graphs, 0 elsewhere.
    prompt_wait_steps: int | None = Field(None, ge=0)
    # Cached prefixes never serve a request of a newer version.
    enable_prefix_caching: bool = True
    # New weights compute the context of running replies anew: each token is what the weights of
    # its version sample. False: replies go on with what older weights computed, and nothing is
    # computed twice.
    recompute_context: bool = True
    # Passed by name to vLLM's AsyncEngineArgs: max_num_batched_tokens, kv_cache_dtype,
    # compilation_config and so on.
    engine: dict[str, JsonValue] = {}
    # Restarts of a server by `slipstream run` before it gives up; one if the engine did not start.
    max_restarts: int = Field(5, ge=0)
    # Time that running episodes get to end when the server is told to leave (SIGTERM, `slipstream
    # drain`); then they are handed back and run elsewhere. 0: at once.
    drain_timeout_s: float = Field(5.0, ge=0)
    # Limit of starting the engine.
    start_timeout_s: Silence = 600.0
    # What is kept of the output of each environment worker: two files of half as much each; older
    # lines are removed.
    environment_log_mib: Positive = 16
    # Memory of an environment worker with all that it has started; one that takes more is ended.
    # None: half of the machine's, or of the container's.
    environment_memory_gib: float | None = Field(None, gt=0)
    # Processes of an environment worker with all that it has started; one with more is ended.
    environment_processes: Positive = 1000

    def is_eager(self, *, on_cpu: bool) -> bool:
        """Whether the engine compiles nothing, on a CPU or on GPUs."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager

    def has_graphs(self, *, on_cpu: bool) -> bool:
        """Whether the engine's steps are CUDA graphs."""
        return not (on_cpu or self.is_eager(on_cpu=on_cpu))


class WeightsSection(Section):
    """How new weights reach the rollout servers."""

    # nccl: between GPUs; ipc: within one host, also on a shared GPU; gloo: TCP, from main memory.
    # auto: gloo if anything computes on a CPU, ipc on a shared GPU, else nccl.
    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    # Address of trainer rank 0's machine through which the weights travel.
    host: Host = "127.0.0.1"
    # Element type on the wire; None: model.dtype.
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    # Size at which a bucket is closed; the largest tensor's, if that is more.
    bucket_mib: Positive = 64
    # Engines receive weights beside those that serve and pause for the copy alone: shorter pauses
    # for as much more memory as the weights take on the wire.
    stage_on_server: bool = False
    # Limit of one bucket; the trainer waits as long for a server that is not ready, or loads.
    bucket_deadline_s: float = Field(2.0, ge=0.1)
    # Limit of preparing, of joining the communicator and of loading what has come.
    join_deadline_s: Silence = 20.0
    # Publish after every n-th step.
    publish_every_steps: Positive = 1
    # Prove every n-th publish by the log-probabilities of a probe, beside its digests; the first
    # always.
    verify_every: Positive = 10
    # Largest gap of a probe, in nats: the typical error of a logit that its log-probabilities show.
    # None: 1e-3 in float32, and 0.16 where model.dtype or wire_dtype is bfloat16: rounding alone
    # shows 0.06.
    probe_tolerance: float | None = Field(None, gt=0)


class SecuritySection(Section):
    """TLS and the token; both are needed on other addresses than loopback."""

    # PEM file with which a service shows who it is; needs `tls_key`.
    tls_certificate: Path | None = None
    # PEM file of the certificate's key.
    tls_key: Path | None = None
    # PEM file of the authority by which callers know the controller; None: its certificate.
    tls_ca: Path | None = None
    # A file with a secret of at least 32 characters that every caller sends.
    token_file: Path | None = None
    # Let torch's rendezvous and the weights, which know neither TLS nor token, use addresses that
    # are not private.
    allow_public_addresses: bool = False

    @model_validator(mode="after")
    def _pairs(self) -> SecuritySection:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together, only one is set")
        return self
