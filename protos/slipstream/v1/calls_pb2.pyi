from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import environment_pb2 as _environment_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EpisodeName(_message.Message):
    __slots__ = ("group_id", "member", "attempt", "server_epoch")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    member: int
    attempt: int
    server_epoch: int
    def __init__(self, group_id: _Optional[str] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., server_epoch: _Optional[int] = ...) -> None: ...

class CallRecord(_message.Message):
    __slots__ = ("request_digest", "prompt_digest", "token_ids", "behavior_logprobs", "version_spans", "kept_tokens", "finish_reason", "stop_text", "is_cut", "experts_from", "routed_experts", "reply_json", "status", "headers", "compressed_body")
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FROM_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    REPLY_JSON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_BODY_FIELD_NUMBER: _ClassVar[int]
    request_digest: bytes
    prompt_digest: bytes
    token_ids: bytes
    behavior_logprobs: bytes
    version_spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    kept_tokens: bytes
    finish_reason: str
    stop_text: str
    is_cut: bool
    experts_from: int
    routed_experts: _trajectory_pb2.RoutedExperts
    reply_json: str
    status: int
    headers: _containers.RepeatedCompositeFieldContainer[_environment_pb2.HttpHeader]
    compressed_body: bytes
    def __init__(self, request_digest: _Optional[bytes] = ..., prompt_digest: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., behavior_logprobs: _Optional[bytes] = ..., version_spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., kept_tokens: _Optional[bytes] = ..., finish_reason: _Optional[str] = ..., stop_text: _Optional[str] = ..., is_cut: bool = ..., experts_from: _Optional[int] = ..., routed_experts: _Optional[_Union[_trajectory_pb2.RoutedExperts, _Mapping]] = ..., reply_json: _Optional[str] = ..., status: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[_environment_pb2.HttpHeader, _Mapping]]] = ..., compressed_body: _Optional[bytes] = ...) -> None: ...

class BeginEpisodeRequest(_message.Message):
    __slots__ = ("episode", "anew")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    episode: EpisodeName
    anew: bool
    def __init__(self, episode: _Optional[_Union[EpisodeName, _Mapping]] = ..., anew: bool = ...) -> None: ...

class KeepCallRequest(_message.Message):
    __slots__ = ("episode", "call", "record")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    episode: EpisodeName
    call: int
    record: CallRecord
    def __init__(self, episode: _Optional[_Union[EpisodeName, _Mapping]] = ..., call: _Optional[int] = ..., record: _Optional[_Union[CallRecord, _Mapping]] = ...) -> None: ...

class KeepCallResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
