from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvironmentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENVIRONMENT_STATE_UNSPECIFIED: _ClassVar[EnvironmentState]
    ENVIRONMENT_STATE_PENDING: _ClassVar[EnvironmentState]
    ENVIRONMENT_STATE_READY: _ClassVar[EnvironmentState]
    ENVIRONMENT_STATE_SUSPENDED: _ClassVar[EnvironmentState]
ENVIRONMENT_STATE_UNSPECIFIED: EnvironmentState
ENVIRONMENT_STATE_PENDING: EnvironmentState
ENVIRONMENT_STATE_READY: EnvironmentState
ENVIRONMENT_STATE_SUSPENDED: EnvironmentState

class EnvironmentSpec(_message.Message):
    __slots__ = ("name", "reference", "args_json", "weight", "timeout_s", "num_workers", "search_path", "purpose", "chat_template_kwargs_json", "python", "adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_PATH_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    reference: str
    args_json: str
    weight: float
    timeout_s: float
    num_workers: int
    search_path: str
    purpose: _trajectory_pb2.EpisodePurpose
    chat_template_kwargs_json: str
    python: str
    adapter: str
    def __init__(self, name: _Optional[str] = ..., reference: _Optional[str] = ..., args_json: _Optional[str] = ..., weight: _Optional[float] = ..., timeout_s: _Optional[float] = ..., num_workers: _Optional[int] = ..., search_path: _Optional[str] = ..., purpose: _Optional[_Union[_trajectory_pb2.EpisodePurpose, str]] = ..., chat_template_kwargs_json: _Optional[str] = ..., python: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class EvaluationRound(_message.Message):
    __slots__ = ("step", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class EnvironmentStatus(_message.Message):
    __slots__ = ("spec", "state", "num_tasks", "cause", "groups_accepted", "groups_failed", "episodes_failed", "reward_mean", "newest_round")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FAILED_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FAILED_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_ROUND_FIELD_NUMBER: _ClassVar[int]
    spec: EnvironmentSpec
    state: EnvironmentState
    num_tasks: int
    cause: str
    groups_accepted: int
    groups_failed: int
    episodes_failed: int
    reward_mean: float
    newest_round: EvaluationRound
    def __init__(self, spec: _Optional[_Union[EnvironmentSpec, _Mapping]] = ..., state: _Optional[_Union[EnvironmentState, str]] = ..., num_tasks: _Optional[int] = ..., cause: _Optional[str] = ..., groups_accepted: _Optional[int] = ..., groups_failed: _Optional[int] = ..., episodes_failed: _Optional[int] = ..., reward_mean: _Optional[float] = ..., newest_round: _Optional[_Union[EvaluationRound, _Mapping]] = ...) -> None: ...

class SubmitEnvironmentRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: EnvironmentSpec
    def __init__(self, spec: _Optional[_Union[EnvironmentSpec, _Mapping]] = ...) -> None: ...

class SubmitEnvironmentResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: EnvironmentStatus
    def __init__(self, status: _Optional[_Union[EnvironmentStatus, _Mapping]] = ...) -> None: ...

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments",)
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentStatus]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentStatus, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: bytes
    def __init__(self, text: _Optional[str] = ..., image: _Optional[bytes] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_call_id", "parts", "tool_calls", "reasoning", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_call_id: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ParsedReply(_message.Message):
    __slots__ = ("content", "reasoning", "tool_calls")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    content: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, content: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("call_id", "load", "reset", "step", "close", "ping", "reply_part", "follow_agent", "judge_group")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REPLY_PART_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_AGENT_FIELD_NUMBER: _ClassVar[int]
    JUDGE_GROUP_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    load: LoadCommand
    reset: ResetCommand
    step: StepCommand
    close: CloseCommand
    ping: PingCommand
    reply_part: ReplyPart
    follow_agent: FollowAgentCommand
    judge_group: JudgeGroupCommand
    def __init__(self, call_id: _Optional[int] = ..., load: _Optional[_Union[LoadCommand, _Mapping]] = ..., reset: _Optional[_Union[ResetCommand, _Mapping]] = ..., step: _Optional[_Union[StepCommand, _Mapping]] = ..., close: _Optional[_Union[CloseCommand, _Mapping]] = ..., ping: _Optional[_Union[PingCommand, _Mapping]] = ..., reply_part: _Optional[_Union[ReplyPart, _Mapping]] = ..., follow_agent: _Optional[_Union[FollowAgentCommand, _Mapping]] = ..., judge_group: _Optional[_Union[JudgeGroupCommand, _Mapping]] = ...) -> None: ...

class LoadCommand(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: EnvironmentSpec
    def __init__(self, spec: _Optional[_Union[EnvironmentSpec, _Mapping]] = ...) -> None: ...

class ResetCommand(_message.Message):
    __slots__ = ("episode_key", "task_index", "seed")
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    task_index: int
    seed: int
    def __init__(self, episode_key: _Optional[str] = ..., task_index: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("episode_key", "reply", "truncated", "parsed", "token_ids")
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PARSED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    reply: str
    truncated: bool
    parsed: ParsedReply
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, episode_key: _Optional[str] = ..., reply: _Optional[str] = ..., truncated: bool = ..., parsed: _Optional[_Union[ParsedReply, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseCommand(_message.Message):
    __slots__ = ("episode_key",)
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    def __init__(self, episode_key: _Optional[str] = ...) -> None: ...

class PingCommand(_message.Message):
    __slots__ = ("episode_key",)
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    def __init__(self, episode_key: _Optional[str] = ...) -> None: ...

class FollowAgentCommand(_message.Message):
    __slots__ = ("episode_key",)
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    def __init__(self, episode_key: _Optional[str] = ...) -> None: ...

class JudgeGroupCommand(_message.Message):
    __slots__ = ("episode_key", "episodes")
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    episodes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, episode_key: _Optional[str] = ..., episodes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FinishedEpisode(_message.Message):
    __slots__ = ("member", "replies", "reward", "metrics", "truncated")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    member: int
    replies: _containers.RepeatedCompositeFieldContainer[StepCommand]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    truncated: bool
    def __init__(self, member: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[StepCommand, _Mapping]]] = ..., reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., truncated: bool = ...) -> None: ...

class HttpHeader(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ReplyPart(_message.Message):
    __slots__ = ("episode_key", "call", "status", "headers", "body", "is_last")
    EPISODE_KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    episode_key: str
    call: int
    status: int
    headers: _containers.RepeatedCompositeFieldContainer[HttpHeader]
    body: bytes
    is_last: bool
    def __init__(self, episode_key: _Optional[str] = ..., call: _Optional[int] = ..., status: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[HttpHeader, _Mapping]]] = ..., body: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("call_id", "hello", "loaded", "observation", "verdict", "failure", "pong", "agent_call", "agent_result", "group_verdict")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    AGENT_CALL_FIELD_NUMBER: _ClassVar[int]
    AGENT_RESULT_FIELD_NUMBER: _ClassVar[int]
    GROUP_VERDICT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    hello: WorkerHello
    loaded: Loaded
    observation: Observation
    verdict: Verdict
    failure: _trajectory_pb2.Failure
    pong: Pong
    agent_call: AgentCall
    agent_result: AgentResult
    group_verdict: GroupVerdict
    def __init__(self, call_id: _Optional[int] = ..., hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., failure: _Optional[_Union[_trajectory_pb2.Failure, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., agent_call: _Optional[_Union[AgentCall, _Mapping]] = ..., agent_result: _Optional[_Union[AgentResult, _Mapping]] = ..., group_verdict: _Optional[_Union[GroupVerdict, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("spec", "num_tasks", "max_episodes", "digest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec: EnvironmentSpec
    num_tasks: int
    max_episodes: int
    digest: str
    def __init__(self, spec: _Optional[_Union[EnvironmentSpec, _Mapping]] = ..., num_tasks: _Optional[int] = ..., max_episodes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("num_tasks", "digest")
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tasks: int
    digest: str
    def __init__(self, num_tasks: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("messages", "max_reply_tokens", "is_agent", "tools_json", "given_reply", "expected_answer", "judges_group", "teacher_messages")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_AGENT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    GIVEN_REPLY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ANSWER_FIELD_NUMBER: _ClassVar[int]
    JUDGES_GROUP_FIELD_NUMBER: _ClassVar[int]
    TEACHER_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    max_reply_tokens: int
    is_agent: bool
    tools_json: str
    given_reply: str
    expected_answer: str
    judges_group: bool
    teacher_messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., max_reply_tokens: _Optional[int] = ..., is_agent: bool = ..., tools_json: _Optional[str] = ..., given_reply: _Optional[str] = ..., expected_answer: _Optional[str] = ..., judges_group: bool = ..., teacher_messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class AgentCall(_message.Message):
    __slots__ = ("call", "method", "path", "headers", "body", "branch", "is_abandoned")
    CALL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    IS_ABANDONED_FIELD_NUMBER: _ClassVar[int]
    call: int
    method: str
    path: str
    headers: _containers.RepeatedCompositeFieldContainer[HttpHeader]
    body: bytes
    branch: str
    is_abandoned: bool
    def __init__(self, call: _Optional[int] = ..., method: _Optional[str] = ..., path: _Optional[str] = ..., headers: _Optional[_Iterable[_Union[HttpHeader, _Mapping]]] = ..., body: _Optional[bytes] = ..., branch: _Optional[str] = ..., is_abandoned: bool = ...) -> None: ...

class ReplyReward(_message.Message):
    __slots__ = ("reply_id", "reward", "token_rewards")
    REPLY_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    reply_id: str
    reward: float
    token_rewards: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, reply_id: _Optional[str] = ..., reward: _Optional[float] = ..., token_rewards: _Optional[_Iterable[float]] = ...) -> None: ...

class AgentResult(_message.Message):
    __slots__ = ("reward", "metrics", "shares", "rewards", "reply_rewards")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    REPLY_REWARDS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    shares: _containers.ScalarMap[str, float]
    rewards: _containers.ScalarMap[str, float]
    reply_rewards: _containers.RepeatedCompositeFieldContainer[ReplyReward]
    def __init__(self, reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., shares: _Optional[_Mapping[str, float]] = ..., rewards: _Optional[_Mapping[str, float]] = ..., reply_rewards: _Optional[_Iterable[_Union[ReplyReward, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("reward", "done", "messages", "metrics", "tools_json", "given_reply", "token_rewards", "teacher_messages")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    GIVEN_REPLY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    reward: float
    done: bool
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    metrics: _containers.ScalarMap[str, float]
    tools_json: str
    given_reply: str
    token_rewards: _containers.RepeatedScalarFieldContainer[float]
    teacher_messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, reward: _Optional[float] = ..., done: bool = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., tools_json: _Optional[str] = ..., given_reply: _Optional[str] = ..., token_rewards: _Optional[_Iterable[float]] = ..., teacher_messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class GroupVerdict(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[EpisodeVerdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[EpisodeVerdict, _Mapping]]] = ...) -> None: ...

class EpisodeVerdict(_message.Message):
    __slots__ = ("reward", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("place",)
    PLACE_FIELD_NUMBER: _ClassVar[int]
    place: str
    def __init__(self, place: _Optional[str] = ...) -> None: ...
