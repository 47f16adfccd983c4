from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import environment_pb2 as _environment_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_JOINING: _ClassVar[ServerState]
    SERVER_STATE_LOADING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_STALE: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_DEAD: _ClassVar[ServerState]
    SERVER_STATE_LEFT: _ClassVar[ServerState]

class PublishPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUBLISH_PHASE_UNSPECIFIED: _ClassVar[PublishPhase]
    PUBLISH_PHASE_READY: _ClassVar[PublishPhase]
    PUBLISH_PHASE_LOADED: _ClassVar[PublishPhase]
    PUBLISH_PHASE_SERVING: _ClassVar[PublishPhase]
    PUBLISH_PHASE_FAILED: _ClassVar[PublishPhase]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_JOINING: ServerState
SERVER_STATE_LOADING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_STALE: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_DEAD: ServerState
SERVER_STATE_LEFT: ServerState
PUBLISH_PHASE_UNSPECIFIED: PublishPhase
PUBLISH_PHASE_READY: PublishPhase
PUBLISH_PHASE_LOADED: PublishPhase
PUBLISH_PHASE_SERVING: PublishPhase
PUBLISH_PHASE_FAILED: PublishPhase

class SamplingSettings(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_reply_tokens", "max_turns", "max_episode_tokens", "ignore_eos", "max_prompt_tokens", "stop_token_ids", "stop", "max_total_tokens", "max_branches", "max_images", "max_image_bytes", "adapter", "by_start", "prompt_logprobs", "seed", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BY_START_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_reply_tokens: int
    max_turns: int
    max_episode_tokens: int
    ignore_eos: bool
    max_prompt_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_total_tokens: int
    max_branches: int
    max_images: int
    max_image_bytes: int
    adapter: str
    by_start: bool
    prompt_logprobs: bool
    seed: int
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_reply_tokens: _Optional[int] = ..., max_turns: _Optional[int] = ..., max_episode_tokens: _Optional[int] = ..., ignore_eos: bool = ..., max_prompt_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., max_total_tokens: _Optional[int] = ..., max_branches: _Optional[int] = ..., max_images: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., adapter: _Optional[str] = ..., by_start: bool = ..., prompt_logprobs: bool = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("group_id", "environment", "task_index", "seed", "members", "deadline_step", "purpose", "sampling", "max_attempts", "first_attempt", "timeout_s", "chat_template_kwargs_json", "prompt_token_ids", "has_reference")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_STEP_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    environment: str
    task_index: int
    seed: int
    members: _containers.RepeatedScalarFieldContainer[int]
    deadline_step: int
    purpose: _trajectory_pb2.EpisodePurpose
    sampling: SamplingSettings
    max_attempts: int
    first_attempt: int
    timeout_s: float
    chat_template_kwargs_json: str
    prompt_token_ids: bytes
    has_reference: bool
    def __init__(self, group_id: _Optional[str] = ..., environment: _Optional[str] = ..., task_index: _Optional[int] = ..., seed: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., deadline_step: _Optional[int] = ..., purpose: _Optional[_Union[_trajectory_pb2.EpisodePurpose, str]] = ..., sampling: _Optional[_Union[SamplingSettings, _Mapping]] = ..., max_attempts: _Optional[int] = ..., first_attempt: _Optional[int] = ..., timeout_s: _Optional[float] = ..., chat_template_kwargs_json: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., has_reference: bool = ...) -> None: ...

class ServerHello(_message.Message):
    __slots__ = ("server_id", "server_epoch", "protocol_version", "max_episodes", "engine_workers", "max_model_len", "host", "queue_bytes", "place", "from_storage", "process", "undelivered", "engine_settings", "disabled_features")
    class DisabledFeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FROM_STORAGE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    server_epoch: int
    protocol_version: int
    max_episodes: int
    engine_workers: int
    max_model_len: int
    host: str
    queue_bytes: int
    place: _weights_pb2.Place
    from_storage: bool
    process: int
    undelivered: _containers.RepeatedScalarFieldContainer[str]
    engine_settings: str
    disabled_features: _containers.ScalarMap[str, str]
    def __init__(self, server_id: _Optional[str] = ..., server_epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., max_episodes: _Optional[int] = ..., engine_workers: _Optional[int] = ..., max_model_len: _Optional[int] = ..., host: _Optional[str] = ..., queue_bytes: _Optional[int] = ..., place: _Optional[_Union[_weights_pb2.Place, _Mapping]] = ..., from_storage: bool = ..., process: _Optional[int] = ..., undelivered: _Optional[_Iterable[str]] = ..., engine_settings: _Optional[str] = ..., disabled_features: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ServerReport(_message.Message):
    __slots__ = ("generated_tokens", "in_flight_tokens", "ended_tokens", "open_episodes", "waiting_episodes", "queued_bytes", "busy_s", "uptime_s", "paused_s", "resident_bytes", "drafted_tokens", "accepted_tokens", "ended_episodes", "delivering", "sent", "refused_agents")
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_EPISODES_FIELD_NUMBER: _ClassVar[int]
    WAITING_EPISODES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    DELIVERING_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_AGENTS_FIELD_NUMBER: _ClassVar[int]
    generated_tokens: int
    in_flight_tokens: int
    ended_tokens: int
    open_episodes: int
    waiting_episodes: int
    queued_bytes: int
    busy_s: float
    uptime_s: float
    paused_s: float
    resident_bytes: int
    drafted_tokens: int
    accepted_tokens: int
    ended_episodes: int
    delivering: _trajectory_pb2.Amount
    sent: _trajectory_pb2.Amount
    refused_agents: int
    def __init__(self, generated_tokens: _Optional[int] = ..., in_flight_tokens: _Optional[int] = ..., ended_tokens: _Optional[int] = ..., open_episodes: _Optional[int] = ..., waiting_episodes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., ended_episodes: _Optional[int] = ..., delivering: _Optional[_Union[_trajectory_pb2.Amount, _Mapping]] = ..., sent: _Optional[_Union[_trajectory_pb2.Amount, _Mapping]] = ..., refused_agents: _Optional[int] = ...) -> None: ...

class EnvironmentReport(_message.Message):
    __slots__ = ("environment", "failure", "num_tasks", "digest")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    environment: str
    failure: _trajectory_pb2.Failure
    num_tasks: int
    digest: str
    def __init__(self, environment: _Optional[str] = ..., failure: _Optional[_Union[_trajectory_pb2.Failure, _Mapping]] = ..., num_tasks: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class PublishReport(_message.Message):
    __slots__ = ("publish_id", "phase", "bucket_digests", "probe_logprobs", "message", "paused_s", "stages")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    phase: PublishPhase
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    probe_logprobs: bytes
    message: str
    paused_s: float
    stages: PublishStages
    def __init__(self, publish_id: _Optional[str] = ..., phase: _Optional[_Union[PublishPhase, str]] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ..., probe_logprobs: _Optional[bytes] = ..., message: _Optional[str] = ..., paused_s: _Optional[float] = ..., stages: _Optional[_Union[PublishStages, _Mapping]] = ...) -> None: ...

class PublishStages(_message.Message):
    __slots__ = ("prepare_s", "pause_s", "receive_s", "load_s", "resume_s", "copied", "wire_s", "served_at", "fetch_s", "fetched_bytes", "steps_s", "staged")
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_AT_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_S_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    prepare_s: float
    pause_s: float
    receive_s: float
    load_s: float
    resume_s: float
    copied: bool
    wire_s: float
    served_at: float
    fetch_s: float
    fetched_bytes: int
    steps_s: float
    staged: bool
    def __init__(self, prepare_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., receive_s: _Optional[float] = ..., load_s: _Optional[float] = ..., resume_s: _Optional[float] = ..., copied: bool = ..., wire_s: _Optional[float] = ..., served_at: _Optional[float] = ..., fetch_s: _Optional[float] = ..., fetched_bytes: _Optional[int] = ..., steps_s: _Optional[float] = ..., staged: bool = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "environment", "publish", "drained", "lease", "draining", "rested")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RESTED_FIELD_NUMBER: _ClassVar[int]
    hello: ServerHello
    heartbeat: ServerReport
    environment: EnvironmentReport
    publish: PublishReport
    drained: ServerReport
    lease: LeaseReport
    draining: Draining
    rested: Rested
    def __init__(self, hello: _Optional[_Union[ServerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[ServerReport, _Mapping]] = ..., environment: _Optional[_Union[EnvironmentReport, _Mapping]] = ..., publish: _Optional[_Union[PublishReport, _Mapping]] = ..., drained: _Optional[_Union[ServerReport, _Mapping]] = ..., lease: _Optional[_Union[LeaseReport, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., rested: _Optional[_Union[Rested, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LeaseReport(_message.Message):
    __slots__ = ("group_id", "closed", "unfinished", "next_attempt")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    closed: bool
    unfinished: _containers.RepeatedScalarFieldContainer[int]
    next_attempt: int
    def __init__(self, group_id: _Optional[str] = ..., closed: bool = ..., unfinished: _Optional[_Iterable[int]] = ..., next_attempt: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "heartbeat_s", "heartbeat_timeout_s", "delivery_key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    heartbeat_s: float
    heartbeat_timeout_s: float
    delivery_key: bytes
    def __init__(self, run_id: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., heartbeat_timeout_s: _Optional[float] = ..., delivery_key: _Optional[bytes] = ...) -> None: ...

class EnvironmentOrder(_message.Message):
    __slots__ = ("spec", "unload", "try_reset")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    TRY_RESET_FIELD_NUMBER: _ClassVar[int]
    spec: _environment_pb2.EnvironmentSpec
    unload: bool
    try_reset: bool
    def __init__(self, spec: _Optional[_Union[_environment_pb2.EnvironmentSpec, _Mapping]] = ..., unload: bool = ..., try_reset: bool = ...) -> None: ...

class PreparePublish(_message.Message):
    __slots__ = ("publish_id", "version", "stored")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    version: _trajectory_pb2.PolicyVersion
    stored: _weights_pb2.StoredWeights
    def __init__(self, publish_id: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., stored: _Optional[_Union[_weights_pb2.StoredWeights, _Mapping]] = ...) -> None: ...

class ReceiveWeights(_message.Message):
    __slots__ = ("order", "layout", "first_rank")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    order: _weights_pb2.PublishOrder
    layout: _weights_pb2.WeightLayout
    first_rank: int
    def __init__(self, order: _Optional[_Union[_weights_pb2.PublishOrder, _Mapping]] = ..., layout: _Optional[_Union[_weights_pb2.WeightLayout, _Mapping]] = ..., first_rank: _Optional[int] = ...) -> None: ...

class CommitPublish(_message.Message):
    __slots__ = ("publish_id", "version", "probe", "bucket_digests")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    version: _trajectory_pb2.PolicyVersion
    probe: _weights_pb2.Probe
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, publish_id: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., probe: _Optional[_Union[_weights_pb2.Probe, _Mapping]] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AbortPublish(_message.Message):
    __slots__ = ("publish_id", "reason")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    reason: str
    def __init__(self, publish_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ProbeVerdict(_message.Message):
    __slots__ = ("publish_id", "passed", "message")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    passed: bool
    message: str
    def __init__(self, publish_id: _Optional[str] = ..., passed: bool = ..., message: _Optional[str] = ...) -> None: ...

class Rest(_message.Message):
    __slots__ = ("number", "give_back")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GIVE_BACK_FIELD_NUMBER: _ClassVar[int]
    number: int
    give_back: bool
    def __init__(self, number: _Optional[int] = ..., give_back: bool = ...) -> None: ...

class Wake(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Rested(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CancelLease(_message.Message):
    __slots__ = ("group_id", "reason")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    reason: str
    def __init__(self, group_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "finish", "run_stopped")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RUN_STOPPED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    finish: bool
    run_stopped: bool
    def __init__(self, reason: _Optional[str] = ..., finish: bool = ..., run_stopped: bool = ...) -> None: ...

class ControllerMessage(_message.Message):
    __slots__ = ("welcome", "lease", "cancel", "environment", "prepare", "receive", "commit", "abort", "probe_verdict", "drain", "rest", "wake")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_VERDICT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    lease: Lease
    cancel: CancelLease
    environment: EnvironmentOrder
    prepare: PreparePublish
    receive: ReceiveWeights
    commit: CommitPublish
    abort: AbortPublish
    probe_verdict: ProbeVerdict
    drain: Drain
    rest: Rest
    wake: Wake
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., cancel: _Optional[_Union[CancelLease, _Mapping]] = ..., environment: _Optional[_Union[EnvironmentOrder, _Mapping]] = ..., prepare: _Optional[_Union[PreparePublish, _Mapping]] = ..., receive: _Optional[_Union[ReceiveWeights, _Mapping]] = ..., commit: _Optional[_Union[CommitPublish, _Mapping]] = ..., abort: _Optional[_Union[AbortPublish, _Mapping]] = ..., probe_verdict: _Optional[_Union[ProbeVerdict, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ..., wake: _Optional[_Union[Wake, _Mapping]] = ...) -> None: ...

class EnvironmentCall(_message.Message):
    __slots__ = ("environment", "command")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    environment: str
    command: _environment_pb2.WorkerCommand
    def __init__(self, environment: _Optional[str] = ..., command: _Optional[_Union[_environment_pb2.WorkerCommand, _Mapping]] = ...) -> None: ...

class EnvironmentAnswer(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: _environment_pb2.WorkerMessage
    def __init__(self, message: _Optional[_Union[_environment_pb2.WorkerMessage, _Mapping]] = ...) -> None: ...
