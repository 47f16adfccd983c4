from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "sender")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    sender: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., sender: _Optional[int] = ...) -> None: ...

class WeightLayout(_message.Message):
    __slots__ = ("tensors", "bucket_bytes", "adapters", "adapter_scale", "adapter_names")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SCALE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    bucket_bytes: int
    adapters: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    adapter_scale: float
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., adapter_scale: _Optional[float] = ..., adapter_names: _Optional[_Iterable[str]] = ...) -> None: ...

class Communicator(_message.Message):
    __slots__ = ("communicator_id", "transport", "store_host", "store_port", "world_size", "unique_id", "num_senders", "path")
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    communicator_id: str
    transport: str
    store_host: str
    store_port: int
    world_size: int
    unique_id: bytes
    num_senders: int
    path: str
    def __init__(self, communicator_id: _Optional[str] = ..., transport: _Optional[str] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., world_size: _Optional[int] = ..., unique_id: _Optional[bytes] = ..., num_senders: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class StoredWeights(_message.Message):
    __slots__ = ("key", "num_bytes", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    num_bytes: int
    digest: bytes
    def __init__(self, key: _Optional[str] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StoredObject(_message.Message):
    __slots__ = ("key", "num_bytes", "digest", "buckets")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    key: str
    num_bytes: int
    digest: bytes
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[str] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class StoredLink(_message.Message):
    __slots__ = ("version", "objects", "delta", "bucket_digests")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    objects: _containers.RepeatedCompositeFieldContainer[StoredObject]
    delta: Delta
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., objects: _Optional[_Iterable[_Union[StoredObject, _Mapping]]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoredManifest(_message.Message):
    __slots__ = ("layout", "links")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    layout: WeightLayout
    links: _containers.RepeatedCompositeFieldContainer[StoredLink]
    def __init__(self, layout: _Optional[_Union[WeightLayout, _Mapping]] = ..., links: _Optional[_Iterable[_Union[StoredLink, _Mapping]]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("host_id", "gpus", "nccl")
    class NcclEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    nccl: _containers.ScalarMap[str, str]
    def __init__(self, host_id: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ..., nccl: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Receiver(_message.Message):
    __slots__ = ("server_id", "first_rank", "num_workers")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    first_rank: int
    num_workers: int
    def __init__(self, server_id: _Optional[str] = ..., first_rank: _Optional[int] = ..., num_workers: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("token_ids", "lengths", "expected_logprobs", "tolerance", "adapters")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    expected_logprobs: bytes
    tolerance: float
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., expected_logprobs: _Optional[bytes] = ..., tolerance: _Optional[float] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, changed: _Optional[_Iterable[int]] = ...) -> None: ...

class PublishOrder(_message.Message):
    __slots__ = ("publish_id", "version", "communicator", "new_communicator", "receivers", "verify", "bucket_deadline_s", "join_deadline_s", "begun", "adapters_alone")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    NEW_COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_ALONE_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    version: _trajectory_pb2.PolicyVersion
    communicator: Communicator
    new_communicator: bool
    receivers: _containers.RepeatedCompositeFieldContainer[Receiver]
    verify: bool
    bucket_deadline_s: float
    join_deadline_s: float
    begun: bool
    adapters_alone: bool
    def __init__(self, publish_id: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., communicator: _Optional[_Union[Communicator, _Mapping]] = ..., new_communicator: bool = ..., receivers: _Optional[_Iterable[_Union[Receiver, _Mapping]]] = ..., verify: bool = ..., bucket_deadline_s: _Optional[float] = ..., join_deadline_s: _Optional[float] = ..., begun: bool = ..., adapters_alone: bool = ...) -> None: ...
