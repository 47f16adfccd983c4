from slipstream.v1 import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EpisodeStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EPISODE_STATUS_UNSPECIFIED: _ClassVar[EpisodeStatus]
    EPISODE_STATUS_COMPLETED: _ClassVar[EpisodeStatus]
    EPISODE_STATUS_TRUNCATED: _ClassVar[EpisodeStatus]
    EPISODE_STATUS_FAILED: _ClassVar[EpisodeStatus]
    EPISODE_STATUS_CANCELLED: _ClassVar[EpisodeStatus]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_ENVIRONMENT: _ClassVar[FailureKind]
    FAILURE_KIND_TIMEOUT: _ClassVar[FailureKind]
    FAILURE_KIND_ENGINE: _ClassVar[FailureKind]
    FAILURE_KIND_INFRASTRUCTURE: _ClassVar[FailureKind]
    FAILURE_KIND_PROMPT_TOO_LONG: _ClassVar[FailureKind]
    FAILURE_KIND_BYSTANDER: _ClassVar[FailureKind]

class EpisodePurpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EPISODE_PURPOSE_UNSPECIFIED: _ClassVar[EpisodePurpose]
    EPISODE_PURPOSE_TRAINING: _ClassVar[EpisodePurpose]
    EPISODE_PURPOSE_EVALUATION: _ClassVar[EpisodePurpose]
EPISODE_STATUS_UNSPECIFIED: EpisodeStatus
EPISODE_STATUS_COMPLETED: EpisodeStatus
EPISODE_STATUS_TRUNCATED: EpisodeStatus
EPISODE_STATUS_FAILED: EpisodeStatus
EPISODE_STATUS_CANCELLED: EpisodeStatus
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_ENVIRONMENT: FailureKind
FAILURE_KIND_TIMEOUT: FailureKind
FAILURE_KIND_ENGINE: FailureKind
FAILURE_KIND_INFRASTRUCTURE: FailureKind
FAILURE_KIND_PROMPT_TOO_LONG: FailureKind
FAILURE_KIND_BYSTANDER: FailureKind
EPISODE_PURPOSE_UNSPECIFIED: EpisodePurpose
EPISODE_PURPOSE_TRAINING: EpisodePurpose
EPISODE_PURPOSE_EVALUATION: EpisodePurpose

class PolicyVersion(_message.Message):
    __slots__ = ("incarnation", "step")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("length", "version")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    length: int
    version: PolicyVersion
    def __init__(self, length: _Optional[int] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("expert_ids", "num_layers", "top_k", "num_experts")
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    expert_ids: bytes
    num_layers: int
    top_k: int
    num_experts: int
    def __init__(self, expert_ids: _Optional[bytes] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., num_experts: _Optional[int] = ...) -> None: ...

class ReferenceLogprobs(_message.Message):
    __slots__ = ("logprobs", "top_k", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_k: int
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_k: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("num_runs", "share", "name", "reward")
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    num_runs: int
    share: float
    name: str
    reward: float
    def __init__(self, num_runs: _Optional[int] = ..., share: _Optional[float] = ..., name: _Optional[str] = ..., reward: _Optional[float] = ...) -> None: ...

class ImagePlace(_message.Message):
    __slots__ = ("offset", "image")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    image: int
    def __init__(self, offset: _Optional[int] = ..., image: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("run_id", "group_id", "member", "attempt", "server_id", "server_epoch", "environment", "task_index", "seed", "purpose", "status", "failure", "will_retry", "token_ids", "run_lengths", "behavior_logprobs", "version_spans", "reward", "metrics", "num_turns", "generation_s", "environment_s", "checksum", "reply_text", "prompt_text", "routed_experts", "branches", "is_given", "reference", "images", "image_places", "adapter", "max_reply_tokens", "expected_answer", "token_rewards", "prompt_logprobs", "kept_tokens", "judged_lease", "teacher_prompt")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WILL_RETRY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_S_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_S_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REPLY_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    IS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PLACES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_LEASE_FIELD_NUMBER: _ClassVar[int]
    TEACHER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_id: str
    member: int
    attempt: int
    server_id: str
    server_epoch: int
    environment: str
    task_index: int
    seed: int
    purpose: EpisodePurpose
    status: EpisodeStatus
    failure: Failure
    will_retry: bool
    token_ids: bytes
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    behavior_logprobs: bytes
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    num_turns: int
    generation_s: float
    environment_s: float
    checksum: int
    reply_text: str
    prompt_text: str
    routed_experts: RoutedExperts
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    is_given: bool
    reference: ReferenceLogprobs
    images: _containers.RepeatedScalarFieldContainer[bytes]
    image_places: _containers.RepeatedCompositeFieldContainer[ImagePlace]
    adapter: str
    max_reply_tokens: int
    expected_answer: str
    token_rewards: bytes
    prompt_logprobs: bytes
    kept_tokens: bytes
    judged_lease: int
    teacher_prompt: bytes
    def __init__(self, run_id: _Optional[str] = ..., group_id: _Optional[str] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., server_id: _Optional[str] = ..., server_epoch: _Optional[int] = ..., environment: _Optional[str] = ..., task_index: _Optional[int] = ..., seed: _Optional[int] = ..., purpose: _Optional[_Union[EpisodePurpose, str]] = ..., status: _Optional[_Union[EpisodeStatus, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., will_retry: bool = ..., token_ids: _Optional[bytes] = ..., run_lengths: _Optional[_Iterable[int]] = ..., behavior_logprobs: _Optional[bytes] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., num_turns: _Optional[int] = ..., generation_s: _Optional[float] = ..., environment_s: _Optional[float] = ..., checksum: _Optional[int] = ..., reply_text: _Optional[str] = ..., prompt_text: _Optional[str] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., is_given: bool = ..., reference: _Optional[_Union[ReferenceLogprobs, _Mapping]] = ..., images: _Optional[_Iterable[bytes]] = ..., image_places: _Optional[_Iterable[_Union[ImagePlace, _Mapping]]] = ..., adapter: _Optional[str] = ..., max_reply_tokens: _Optional[int] = ..., expected_answer: _Optional[str] = ..., token_rewards: _Optional[bytes] = ..., prompt_logprobs: _Optional[bytes] = ..., kept_tokens: _Optional[bytes] = ..., judged_lease: _Optional[int] = ..., teacher_prompt: _Optional[bytes] = ...) -> None: ...

class Amount(_message.Message):
    __slots__ = ("trajectories", "tokens")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    trajectories: int
    tokens: int
    def __init__(self, trajectories: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("trajectory", "trajectory_id", "tokens", "sent")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    trajectory: bytes
    trajectory_id: str
    tokens: int
    sent: Amount
    def __init__(self, trajectory: _Optional[bytes] = ..., trajectory_id: _Optional[str] = ..., tokens: _Optional[int] = ..., sent: _Optional[_Union[Amount, _Mapping]] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ("acknowledged_ids",)
    ACKNOWLEDGED_IDS_FIELD_NUMBER: _ClassVar[int]
    acknowledged_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, acknowledged_ids: _Optional[_Iterable[str]] = ...) -> None: ...
