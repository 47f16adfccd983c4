from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import fleet_pb2 as _fleet_pb2
from slipstream.v1 import trainer_pb2 as _trainer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(_message.Message):
    __slots__ = ("id", "stream", "number", "begin", "compute", "step", "publish", "save", "load", "refused", "sample", "finish", "max_staleness", "told", "user_metadata", "kept", "digest", "trainer_ends")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ENDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    stream: str
    number: int
    begin: Begin
    compute: _trainer_pb2.Pass
    step: _trainer_pb2.AdamNumbers
    publish: Publish
    save: Save
    load: Load
    refused: Refused
    sample: Sample
    finish: Finish
    max_staleness: int
    told: _containers.RepeatedScalarFieldContainer[str]
    user_metadata: _containers.ScalarMap[str, str]
    kept: Kept
    digest: bytes
    trainer_ends: int
    def __init__(self, id: _Optional[str] = ..., stream: _Optional[str] = ..., number: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., compute: _Optional[_Union[_trainer_pb2.Pass, _Mapping]] = ..., step: _Optional[_Union[_trainer_pb2.AdamNumbers, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., max_staleness: _Optional[int] = ..., told: _Optional[_Iterable[str]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., digest: _Optional[bytes] = ..., trainer_ends: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("until_unix_s", "is_deleted")
    UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    IS_DELETED_FIELD_NUMBER: _ClassVar[int]
    until_unix_s: float
    is_deleted: bool
    def __init__(self, until_unix_s: _Optional[float] = ..., is_deleted: bool = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("adapter", "values")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    adapter: _trainer_pb2.Adapter
    values: _trainer_pb2.NewAdapter
    def __init__(self, adapter: _Optional[_Union[_trainer_pb2.Adapter, _Mapping]] = ..., values: _Optional[_Union[_trainer_pb2.NewAdapter, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Publish(_message.Message):
    __slots__ = ("name", "in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    in_flight: bool
    def __init__(self, name: _Optional[str] = ..., in_flight: bool = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("name", "may_replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAY_REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    may_replace: bool
    def __init__(self, name: _Optional[str] = ..., may_replace: bool = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("name", "without_optimizer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    name: str
    without_optimizer: bool
    def __init__(self, name: _Optional[str] = ..., without_optimizer: bool = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("prompt_token_ids", "num_samples", "sampling", "name")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: bytes
    num_samples: int
    sampling: _fleet_pb2.SamplingSettings
    name: str
    def __init__(self, prompt_token_ids: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., sampling: _Optional[_Union[_fleet_pb2.SamplingSettings, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class OperationReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("name", "kept")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kept: Kept
    def __init__(self, name: _Optional[str] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class KeepReceipt(_message.Message):
    __slots__ = ("is_unknown",)
    IS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    is_unknown: bool
    def __init__(self, is_unknown: bool = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("id", "limit_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    limit_s: float
    def __init__(self, id: _Optional[str] = ..., limit_s: _Optional[float] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("token_ids", "logprobs", "truncated", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    truncated: bool
    prompt_logprobs: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., truncated: bool = ..., prompt_logprobs: _Optional[bytes] = ...) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("is_unknown", "is_done", "error", "step", "compute", "metrics", "samples", "name", "adapter", "steps", "id")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    IS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    is_unknown: bool
    is_done: bool
    error: str
    step: int
    compute: _trainer_pb2.PassReport
    metrics: _containers.ScalarMap[str, float]
    samples: _containers.RepeatedCompositeFieldContainer[Sampled]
    name: str
    adapter: _trainer_pb2.Adapter
    steps: int
    id: str
    def __init__(self, is_unknown: bool = ..., is_done: bool = ..., error: _Optional[str] = ..., step: _Optional[int] = ..., compute: _Optional[_Union[_trainer_pb2.PassReport, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., samples: _Optional[_Iterable[_Union[Sampled, _Mapping]]] = ..., name: _Optional[str] = ..., adapter: _Optional[_Union[_trainer_pb2.Adapter, _Mapping]] = ..., steps: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...
