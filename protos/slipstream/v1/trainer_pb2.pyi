from slipstream.v1 import bounds_pb2 as _bounds_pb2
from slipstream.v1 import trajectory_pb2 as _trajectory_pb2
from slipstream.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerHello(_message.Message):
    __slots__ = ("world_size", "layout_description", "version", "weight_digest", "num_parameters", "num_senders", "places", "process")
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDERS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    world_size: int
    layout_description: str
    version: _trajectory_pb2.PolicyVersion
    weight_digest: bytes
    num_parameters: int
    num_senders: int
    places: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Place]
    process: str
    def __init__(self, world_size: _Optional[int] = ..., layout_description: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., weight_digest: _Optional[bytes] = ..., num_parameters: _Optional[int] = ..., num_senders: _Optional[int] = ..., places: _Optional[_Iterable[_Union[_weights_pb2.Place, _Mapping]]] = ..., process: _Optional[str] = ...) -> None: ...

class TrainerWelcome(_message.Message):
    __slots__ = ("run_id", "version", "trainer_epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: _trajectory_pb2.PolicyVersion
    trainer_epoch: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., trainer_epoch: _Optional[int] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlaceKept(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NextRequest(_message.Message):
    __slots__ = ("version", "communicator_id", "bucket_digests", "can_store", "held_passes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CAN_STORE_FIELD_NUMBER: _ClassVar[int]
    HELD_PASSES_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    communicator_id: str
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    can_store: bool
    held_passes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., communicator_id: _Optional[str] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ..., can_store: bool = ..., held_passes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("step", "batch_id", "num_groups", "num_trajectories", "given")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    step: int
    batch_id: str
    num_groups: int
    num_trajectories: int
    given: GivenStep
    def __init__(self, step: _Optional[int] = ..., batch_id: _Optional[str] = ..., num_groups: _Optional[int] = ..., num_trajectories: _Optional[int] = ..., given: _Optional[_Union[GivenStep, _Mapping]] = ...) -> None: ...

class GivenStep(_message.Message):
    __slots__ = ("adam", "load", "begin", "serve", "num_passes", "id", "adapter")
    ADAM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adam: AdamNumbers
    load: LoadedState
    begin: NewAdapter
    serve: ServedAdapter
    num_passes: int
    id: str
    adapter: Adapter
    def __init__(self, adam: _Optional[_Union[AdamNumbers, _Mapping]] = ..., load: _Optional[_Union[LoadedState, _Mapping]] = ..., begin: _Optional[_Union[NewAdapter, _Mapping]] = ..., serve: _Optional[_Union[ServedAdapter, _Mapping]] = ..., num_passes: _Optional[int] = ..., id: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "rank", "alpha")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    alpha: float
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ...) -> None: ...

class NewAdapter(_message.Message):
    __slots__ = ("seed", "targets")
    SEED_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seed: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdamNumbers(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., max_grad_norm: _Optional[float] = ...) -> None: ...

class LoadedState(_message.Message):
    __slots__ = ("step", "without_optimizer", "adapter")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    step: int
    without_optimizer: bool
    adapter: str
    def __init__(self, step: _Optional[int] = ..., without_optimizer: bool = ..., adapter: _Optional[str] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("id", "backward", "loss", "loss_args_json", "sequences", "adapter")
    ID_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    backward: bool
    loss: str
    loss_args_json: str
    sequences: _containers.RepeatedCompositeFieldContainer[PassSequence]
    adapter: Adapter
    def __init__(self, id: _Optional[str] = ..., backward: bool = ..., loss: _Optional[str] = ..., loss_args_json: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[PassSequence, _Mapping]]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class PassSequence(_message.Message):
    __slots__ = ("token_ids", "targets", "advantages", "behavior_logprobs", "ratio_mask")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RATIO_MASK_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    targets: bytes
    advantages: bytes
    behavior_logprobs: bytes
    ratio_mask: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., advantages: _Optional[bytes] = ..., behavior_logprobs: _Optional[bytes] = ..., ratio_mask: _Optional[bytes] = ...) -> None: ...

class PassReport(_message.Message):
    __slots__ = ("id", "logprobs", "metrics", "error")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    metrics: _containers.ScalarMap[str, float]
    error: str
    def __init__(self, id: _Optional[str] = ..., logprobs: _Optional[_Iterable[bytes]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ...) -> None: ...

class PassReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrajectoryChunk(_message.Message):
    __slots__ = ("trajectories", "passes", "experts")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    passes: _containers.RepeatedCompositeFieldContainer[Pass]
    experts: _containers.RepeatedCompositeFieldContainer[RecordedExperts]
    def __init__(self, trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ..., passes: _Optional[_Iterable[_Union[Pass, _Mapping]]] = ..., experts: _Optional[_Iterable[_Union[RecordedExperts, _Mapping]]] = ...) -> None: ...

class RecordedExperts(_message.Message):
    __slots__ = ("trajectory", "expert_ids", "checksum")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    trajectory: int
    expert_ids: bytes
    checksum: int
    def __init__(self, trajectory: _Optional[int] = ..., expert_ids: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class BatchFileStart(_message.Message):
    __slots__ = ("release", "header")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    release: str
    header: BatchHeader
    def __init__(self, release: _Optional[str] = ..., header: _Optional[_Union[BatchHeader, _Mapping]] = ...) -> None: ...

class BatchFileEnd(_message.Message):
    __slots__ = ("num_records",)
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    num_records: int
    def __init__(self, num_records: _Optional[int] = ...) -> None: ...

class RecordedBatch(_message.Message):
    __slots__ = ("header", "trajectories", "passes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    passes: _containers.RepeatedCompositeFieldContainer[Pass]
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ..., passes: _Optional[_Iterable[_Union[Pass, _Mapping]]] = ...) -> None: ...

class StopOrder(_message.Message):
    __slots__ = ("reason", "without_model")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_MODEL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    without_model: bool
    def __init__(self, reason: _Optional[str] = ..., without_model: bool = ...) -> None: ...

class WaitOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreOrder(_message.Message):
    __slots__ = ("version", "folder")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    folder: str
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., folder: _Optional[str] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("batch", "chunk", "publish", "stop", "wait", "store", "compute", "save")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    batch: BatchHeader
    chunk: TrajectoryChunk
    publish: _weights_pb2.PublishOrder
    stop: StopOrder
    wait: WaitOrder
    store: StoreOrder
    compute: Pass
    save: SaveOrder
    def __init__(self, batch: _Optional[_Union[BatchHeader, _Mapping]] = ..., chunk: _Optional[_Union[TrajectoryChunk, _Mapping]] = ..., publish: _Optional[_Union[_weights_pb2.PublishOrder, _Mapping]] = ..., stop: _Optional[_Union[StopOrder, _Mapping]] = ..., wait: _Optional[_Union[WaitOrder, _Mapping]] = ..., store: _Optional[_Union[StoreOrder, _Mapping]] = ..., compute: _Optional[_Union[Pass, _Mapping]] = ..., save: _Optional[_Union[SaveOrder, _Mapping]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "batch_id", "version", "weight_digest", "metrics", "wall_s", "advantages")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    batch_id: str
    version: _trajectory_pb2.PolicyVersion
    weight_digest: bytes
    metrics: _containers.ScalarMap[str, float]
    wall_s: float
    advantages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., batch_id: _Optional[str] = ..., version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., weight_digest: _Optional[bytes] = ..., metrics: _Optional[_Mapping[str, float]] = ..., wall_s: _Optional[float] = ..., advantages: _Optional[_Iterable[float]] = ...) -> None: ...

class StepReceipt(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class PublishStart(_message.Message):
    __slots__ = ("publish_id", "layout", "communicator", "is_question")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    IS_QUESTION_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    layout: _weights_pb2.WeightLayout
    communicator: _weights_pb2.Communicator
    is_question: bool
    def __init__(self, publish_id: _Optional[str] = ..., layout: _Optional[_Union[_weights_pb2.WeightLayout, _Mapping]] = ..., communicator: _Optional[_Union[_weights_pb2.Communicator, _Mapping]] = ..., is_question: bool = ...) -> None: ...

class PublishStarted(_message.Message):
    __slots__ = ("receivers",)
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    receivers: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Receiver]
    def __init__(self, receivers: _Optional[_Iterable[_Union[_weights_pb2.Receiver, _Mapping]]] = ...) -> None: ...

class PublishResult(_message.Message):
    __slots__ = ("publish_id", "error", "bucket_digests", "probe", "send_s", "bytes_sent", "wire_s", "wire_bytes")
    PUBLISH_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SEND_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    publish_id: str
    error: str
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    probe: _weights_pb2.Probe
    send_s: float
    bytes_sent: int
    wire_s: float
    wire_bytes: int
    def __init__(self, publish_id: _Optional[str] = ..., error: _Optional[str] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ..., probe: _Optional[_Union[_weights_pb2.Probe, _Mapping]] = ..., send_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., wire_s: _Optional[float] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class PublishReceipt(_message.Message):
    __slots__ = ("discard_communicator",)
    DISCARD_COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    discard_communicator: bool
    def __init__(self, discard_communicator: bool = ...) -> None: ...

class StoredReport(_message.Message):
    __slots__ = ("version", "folder", "error", "stored", "bucket_digests", "probe", "num_bytes", "whole_bytes", "write_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    folder: str
    error: str
    stored: _weights_pb2.StoredWeights
    bucket_digests: _containers.RepeatedScalarFieldContainer[bytes]
    probe: _weights_pb2.Probe
    num_bytes: int
    whole_bytes: int
    write_s: float
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., folder: _Optional[str] = ..., error: _Optional[str] = ..., stored: _Optional[_Union[_weights_pb2.StoredWeights, _Mapping]] = ..., bucket_digests: _Optional[_Iterable[bytes]] = ..., probe: _Optional[_Union[_weights_pb2.Probe, _Mapping]] = ..., num_bytes: _Optional[int] = ..., whole_bytes: _Optional[int] = ..., write_s: _Optional[float] = ...) -> None: ...

class StoredReceipt(_message.Message):
    __slots__ = ("needed",)
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    needed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, needed: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointReport(_message.Message):
    __slots__ = ("version", "weight_digest", "path", "num_bytes", "wall_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    version: _trajectory_pb2.PolicyVersion
    weight_digest: bytes
    path: str
    num_bytes: int
    wall_s: float
    def __init__(self, version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., weight_digest: _Optional[bytes] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., wall_s: _Optional[float] = ...) -> None: ...

class CheckpointReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("loaded_bytes",)
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    loaded_bytes: int
    def __init__(self, loaded_bytes: _Optional[int] = ...) -> None: ...

class WorkReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DataFault(_message.Message):
    __slots__ = ("step", "batch_id", "group_ids")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    batch_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., batch_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TrainerFailure(_message.Message):
    __slots__ = ("message", "rank", "final", "data")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    message: str
    rank: int
    final: bool
    data: DataFault
    def __init__(self, message: _Optional[str] = ..., rank: _Optional[int] = ..., final: bool = ..., data: _Optional[_Union[DataFault, _Mapping]] = ...) -> None: ...

class TrainerFailureReceipt(_message.Message):
    __slots__ = ("set_aside",)
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    set_aside: bool
    def __init__(self, set_aside: bool = ...) -> None: ...

class TrainerGoodbye(_message.Message):
    __slots__ = ("weight_digest", "export_path")
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPORT_PATH_FIELD_NUMBER: _ClassVar[int]
    weight_digest: bytes
    export_path: str
    def __init__(self, weight_digest: _Optional[bytes] = ..., export_path: _Optional[str] = ...) -> None: ...

class TrainerGoodbyeReceipt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
