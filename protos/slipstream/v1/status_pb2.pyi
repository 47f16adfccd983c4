from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import environment_pb2 as _environment_pb2
from slipstream.v1 import fleet_pb2 as _fleet_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_STARTING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
    RUN_STATE_FINISHED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_STOPPED: _ClassVar[RunState]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEVERITY_UNSPECIFIED: _ClassVar[Severity]
    SEVERITY_INFO: _ClassVar[Severity]
    SEVERITY_WARNING: _ClassVar[Severity]
    SEVERITY_ERROR: _ClassVar[Severity]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_STARTING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_STOPPING: RunState
RUN_STATE_FINISHED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_STOPPED: RunState
SEVERITY_UNSPECIFIED: Severity
SEVERITY_INFO: Severity
SEVERITY_WARNING: Severity
SEVERITY_ERROR: Severity

class ServerStatus(_message.Message):
    __slots__ = ("server_id", "server_epoch", "state", "version", "report", "leased_groups", "cause", "silent_s", "disabled_features")
    class DisabledFeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LEASED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    server_epoch: int
    state: _fleet_pb2.ServerState
    version: _trajectory_pb2.PolicyVersion
    report: _fleet_pb2.ServerReport
    leased_groups: int
    cause: str
    silent_s: float
    disabled_features: _containers.ScalarMap[str, str]
    def __init__(self, server_id: _Optional[str] = ..., server_epoch: _Optional[int] = ..., state: _Optional[_Union[_fleet_pb2.ServerState, str]] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., report: _Optional[_Union[_fleet_pb2.ServerReport, _Mapping]] = ..., leased_groups: _Optional[int] = ..., cause: _Optional[str] = ..., silent_s: _Optional[float] = ..., disabled_features: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("generated", "trained", "filtered", "failed", "cancelled", "quarantined", "evaluated", "queued", "in_flight", "lost", "difference", "set_aside", "gaps")
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    generated: int
    trained: int
    filtered: int
    failed: int
    cancelled: int
    quarantined: int
    evaluated: int
    queued: int
    in_flight: int
    lost: int
    difference: int
    set_aside: int
    gaps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generated: _Optional[int] = ..., trained: _Optional[int] = ..., filtered: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., quarantined: _Optional[int] = ..., evaluated: _Optional[int] = ..., queued: _Optional[int] = ..., in_flight: _Optional[int] = ..., lost: _Optional[int] = ..., difference: _Optional[int] = ..., set_aside: _Optional[int] = ..., gaps: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "state", "cause", "step", "num_steps", "max_staleness", "waiting_for", "servers", "environments", "ledger", "leased_groups", "complete_groups", "queued_bytes", "uptime_s", "metrics", "lease_wait", "reserved_bytes", "checkpoint_step")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    LEASED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LEASE_WAIT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    cause: str
    step: int
    num_steps: int
    max_staleness: int
    waiting_for: str
    servers: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    environments: _containers.RepeatedCompositeFieldContainer[_environment_pb2.EnvironmentStatus]
    ledger: Ledger
    leased_groups: int
    complete_groups: int
    queued_bytes: int
    uptime_s: float
    metrics: _containers.ScalarMap[str, float]
    lease_wait: str
    reserved_bytes: int
    checkpoint_step: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., cause: _Optional[str] = ..., step: _Optional[int] = ..., num_steps: _Optional[int] = ..., max_staleness: _Optional[int] = ..., waiting_for: _Optional[str] = ..., servers: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ..., environments: _Optional[_Iterable[_Union[_environment_pb2.EnvironmentStatus, _Mapping]]] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., leased_groups: _Optional[int] = ..., complete_groups: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., uptime_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., lease_wait: _Optional[str] = ..., reserved_bytes: _Optional[int] = ..., checkpoint_step: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "unix_time_s", "severity", "text", "step", "metrics", "final_state")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FINAL_STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_time_s: float
    severity: Severity
    text: str
    step: int
    metrics: _containers.ScalarMap[str, float]
    final_state: RunState
    def __init__(self, number: _Optional[int] = ..., unix_time_s: _Optional[float] = ..., severity: _Optional[_Union[Severity, str]] = ..., text: _Optional[str] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., final_state: _Optional[_Union[RunState, str]] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("reason", "failed")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failed: bool
    def __init__(self, reason: _Optional[str] = ..., failed: bool = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server_id", "reason")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    reason: str
    def __init__(self, server_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ("warning",)
    WARNING_FIELD_NUMBER: _ClassVar[int]
    warning: str
    def __init__(self, warning: _Optional[str] = ...) -> None: ...

class GetSetupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Setup(_message.Message):
    __slots__ = ("run_id", "protocol_version", "versions", "settings", "unix_time_s", "model_digest", "mark")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol_version: int
    versions: _containers.ScalarMap[str, str]
    settings: _containers.ScalarMap[str, str]
    unix_time_s: float
    model_digest: bytes
    mark: str
    def __init__(self, run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., settings: _Optional[_Mapping[str, str]] = ..., unix_time_s: _Optional[float] = ..., model_digest: _Optional[bytes] = ..., mark: _Optional[str] = ...) -> None: ...
