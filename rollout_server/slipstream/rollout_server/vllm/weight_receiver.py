"""The engine workers' side of a publish: a weight-transfer engine for vLLM's registry.

Importing this module registers the engine. Consumes: buckets from the learner. Produces: a loaded
model, one digest for each bucket. Waits for: the communicator (on a thread, while generation
continues) and each bucket. Unblocked by: the bytes, or the deadline of that wait.

The first update goes through vLLM's own loader and checks a copy plan; later updates replay the
plan. A model that the plan does not cover goes through the loader every time. Low-rank adapters
arrive after the weights of the same update, or without weights.
"""

import contextlib
import glob
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import Bucket, adapter_buckets, weight_buckets
from slipstream.protocol.weights.waits import result_of, started
from slipstream.rollout_server.vllm import loader_update
from slipstream.rollout_server.vllm.adapter_slot import Arriving
from slipstream.rollout_server.vllm.loader_update import LoaderUpdate, log
from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import (
    BucketReceiver,
    GlooReceiver,
    Incoming,
    IpcReceiver,
    Phase,
    Seat,
    Staging,
    StorageReceiver,
    Update,
    room,
)
from slipstream.rollout_server.weights.copy_plan import CopyPlan, Replay
from slipstream.rollout_server.weights.weight_update import LoadResult
from slipstream.v1 import weights_pb2
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import reload

TRANSPORTS: dict[str, Callable[[Seat, torch.device], BucketReceiver]] = {
    "gloo": GlooReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "storage": StorageReceiver,
}

BACKEND = "slipstream"


class Joining:
    """Joins a communicator on a thread, while the engine computes."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.communicator_id = seat.communicator.communicator_id

        def join() -> BucketReceiver:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return TRANSPORTS[seat.communicator.transport](seat, device)

        self._joined = started(join, name="weight-join")

    def result(self) -> BucketReceiver | None:
        """Returns the receiver, or None while it is still joining.

        Raises WeightSyncError when it could not join.
        """
        return result_of(self._joined) if self._joined.done() else None

    def close(self) -> None:
        """Leaves the communicator, at once or as soon as the thread has joined."""
        self._joined.add_done_callback(lambda joined: joined.exception() or joined.result().close())


@dataclass
class JoinInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The communicator to join: a serialised `PublishOrder`, and the rank of worker 0 in it."""

    order: bytes
    first_rank: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's argument of an update for which `prepare` was called.

    With `abandon` the update fails at once, which clears vLLM's flag of an open update.
    """

    abandon: bool = False


class SlipstreamWeightTransfer(WeightTransferEngine[JoinInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives the buckets of a publish; copies them by a plan, or has vLLM load them."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _joining: Joining | None = None
    # The update that was prepared; None before `prepare` and after an error.
    _update: Update | None = None
    # That update while vLLM's loader loads it.
    _loading: LoaderUpdate | None = None
    # Memory for updates that arrive beside the live weights.
    _staging: Staging | None = None
    # The layout of later updates: its buckets of weights, and its adapters.
    _layout = b""
    _weights: tuple[Bucket, ...] = ()
    _adapters = Arriving()
    # The buckets for which recording a plan was tried, the plan, and its proved replay.
    _buckets: tuple[Bucket, ...] = ()
    _plan: CopyPlan | None = None
    _replay: Replay | None = None
    # Whether the weights in the model are those of a whole update.
    _is_whole = False

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Leaves the old communicator and begins to join a new one, on a thread.

        Raises WeightSyncError if the transport is unknown.
        """
        self.shutdown()
        # The reload warns at every update of buffers that no checkpoint holds; we check parameters.
        logging.getLogger(reload.initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        order = weights_pb2.PublishOrder.FromString(init_info.order)
        if order.communicator.transport not in TRANSPORTS:
            raise WeightSyncError(f"transport {order.communicator.transport!r} is not known here")
        seat = Seat(
            communicator=order.communicator,
            rank=init_info.first_rank + self.parallel_config.rank,
            join_deadline_s=order.join_deadline_s,
        )
        self._joining = Joining(seat, self.device)

    def learn(self, layout: bytes) -> None:
        """Takes the serialised `WeightLayout` of later updates; records a copy plan if it is new.

        Recording may take longer than a bucket's deadline: call this before joining, or the other
        members would wait.
        """
        if layout == self._layout:
            return
        parsed = weights_pb2.WeightLayout.FromString(layout)
        self._weights = tuple(weight_buckets(parsed))
        buckets, number = tuple(adapter_buckets(parsed)), max(1, len(parsed.adapter_names))
        self._adapters = Arriving(buckets, parsed.adapter_scale, number=number)
        if self._weights and self._weights != self._buckets:
            self._buckets = self._weights
            self._plan = self._replay = None
            self._plan = loader_update.recorded_plan(
                self.model, self._buckets, self.device, self.vllm_config
            )
        self._layout = layout

    def prepare(self, order: weights_pb2.PublishOrder, *, stage: bool) -> None:
        """Prepares to receive the update of `order`, in the layout passed to the last `learn`.

        With `stage` the update is received into separate memory while the engine serves the old
        weights; `stage` has no effect unless `can_copy`. Raises WeightSyncError if the update
        cannot be received.
        """
        self._update = None
        if not self._weights and not self._is_whole:
            raise WeightSyncError("adapters came alone, but the weights before them did not arrive")
        communicator_id = order.communicator.communicator_id
        if self._joining is None or self._joining.communicator_id != communicator_id:
            raise WeightSyncError(f"not a member of communicator {communicator_id!r}")
        stages = stage and self.can_copy
        incoming = Incoming(
            buckets=self._weights + self._adapters.buckets,
            bucket_deadline_s=order.bucket_deadline_s,
            own_buffers=stages or not self.can_copy,
        )
        if stages:
            self._staging = self._staging or Staging(self.device)
            self._staging.clear()
        self._update = Update(incoming, self._staging if stages else None, self._take, self.device)

    def is_ready(self) -> bool:
        """Returns whether an update can be received now. Raises WeightSyncError if it never can."""
        update = self._update
        if self._joining is None or update is None:
            raise WeightSyncError("no update was announced")
        receiver = self._joining.result()
        if receiver is None:
            return False
        memory = update.prepare(receiver)
        if memory is None:
            return False
        if self._replay is not None:
            for place, buffer in enumerate(memory[: len(self._weights)]):
                self._replay.prepare(place, buffer)
        return True

    @property
    def can_copy(self) -> bool:
        return self._replay is not None or not self._weights

    def room(self) -> int:
        """Returns the bytes that an update may take in addition to the live weights."""
        held_bytes = 0 if self._staging is None else self._staging.held_bytes
        return room(self.device, held_bytes, self.parallel_config.world_size)

    def begin_copies(self) -> None:
        """Begins to copy an update, without waiting; `copy_weights` copies the rest."""
        update = self._update_in(Phase.READY)
        if not self.can_copy:
            raise WeightSyncError("the update has no plan for its copies")
        with self._leaving_on_errors():
            update.begin()

    def copy_weights(self) -> None:
        """Receives an update and copies it by the plan; after an error it must be sent again."""
        update = self._update_in(Phase.READY, Phase.COPYING)
        if update.phase is Phase.READY:
            self.begin_copies()
        with self._leaving_on_errors():
            digests = update.finish()
        self._settle()
        self.result = LoadResult(
            digests=[digest.hex() for digest in digests],
            by_plan=True,
            has_plan=self._replay is not None,
            receive_s=update.receive_s,
            load_s=update.seconds() - update.receive_s,
            wire_s=update.receiver.take_wire().seconds,
            began_s=update.began_s(),
        )
        # If the next update is like this one, it needs no `prepare`.
        self._update = update.following()

    def start_weight_update(self) -> None:
        update = self._update_in(Phase.READY)
        self._is_whole = False
        self._loading = LoaderUpdate(self.model, self.model_config)
        update.phase = Phase.LOADING

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads all buckets; after an error the model needs a whole new update."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # The reload keeps tensors that arrived: a second update would mix them with its own.
            reload.finalize_layerwise_reload(self.model, self.model_config)
            self.shutdown()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives all buckets through vLLM's loader."""
        if update_info.abandon:
            raise WeightSyncError("the update was abandoned")
        update = self._update_in(Phase.LOADING)
        assert self._loading is not None
        self._loading.receive(
            update.receiver,
            update.incoming,
            self._plan,
            num_weights=len(self._weights),
            keep_adapters=self._take,
        )

    def finish_weight_update(self) -> None:
        """Finalises the layers; later updates use the plan if it agrees with the result."""
        loading = self._loading
        assert loading is not None
        # The check holds the memory of all buckets whose copies it has not yet seen in the model.
        self._loading = self._update = None
        loading.finish(on_cpu=self.device.type == "cpu")
        if loading.check is not None:
            assert self._plan is not None
            self._replay = loader_update.proved_replay(
                self._plan, loading.check, loading.parameters, self.model
            )
            if self._replay is None:
                # The plan does not do what the loader did.
                self._plan = None
        self._settle()
        self.result = loading.result(has_plan=self._replay is not None)

    def put_adapters_on(self) -> None:
        """Ends an update: activates the adapters that arrived with it."""
        if self._adapters.buckets:
            started_s = time.perf_counter()
            self._adapters.put_on(self.model)
            self._wait_for_device()
            seconds = self.result.load_s + time.perf_counter() - started_s
            self.result = replace(self.result, load_s=seconds)
        self._is_whole = True

    def shutdown(self) -> None:
        """Leaves the communicator."""
        if self._replay is not None:
            self._replay.forget_buffers()
        if self._joining is not None:
            self._joining.close()
        if self._staging is not None:
            self._staging.clear()
        self._joining = self._update = self._loading = None

    def _update_in(self, *phases: Phase) -> Update:
        """Returns the update, which must be in one of `phases`; else raises WeightSyncError."""
        update = self._update
        if update is None or update.phase not in phases:
            raise WeightSyncError("no update was announced")
        return update

    @contextlib.contextmanager
    def _leaving_on_errors(self) -> Iterator[None]:
        """Leaves the communicator on any error: a half-received update cannot be resumed."""
        try:
            yield
        except BaseException:
            self.shutdown()
            raise

    def _take(self, place: int, buffer: torch.Tensor) -> None:
        """Copies a bucket into the parameters, or keeps it if it holds adapters."""
        if place >= len(self._weights):
            self._adapters.keep(place - len(self._weights), buffer)
            return
        assert self._replay is not None
        self._is_whole = False
        self._replay.run(place, buffer)

    def _settle(self) -> None:
        """Waits for the device, then repacks weights that a CPU layer also keeps in packed form."""
        self._wait_for_device()
        if self.device.type == "cpu" and self._weights:
            loader_update.repack_kept_linears(self.model)

    def _wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SlipstreamWeightTransfer)


class WorkerExtension:
    """The methods that vLLM adds to every worker; `self` is the worker.

    Each method returns {"value": its result} or {"error": message}, and never raises. With several
    workers vLLM would raise the first error and leave the answers of the others unread, for the
    next call to read.
    """

    weight_transfer_engine: SlipstreamWeightTransfer
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _began = False

    def slipstream_prepare(
        self, order: bytes, layout: bytes, first_rank: int, stage: bool
    ) -> dict[str, Any]:
        """Prepares to receive an update; the result is whether it can be received already.

        If `order` names a new communicator, begins to join it; `first_rank` is the rank of worker 0
        in it. `order` and `layout` are serialised; for `stage` see `prepare` of the
        `weight_transfer_engine`.
        """

        def prepare() -> bool:
            parsed = weights_pb2.PublishOrder.FromString(order)
            engine = self.weight_transfer_engine
            if parsed.new_communicator:
                engine.shutdown()
            # This comes before joining: once all members have joined, each bucket has its deadline.
            engine.learn(layout)
            if parsed.new_communicator:
                self.init_weight_transfer_engine(asdict(JoinInfo(order, first_rank)))
            engine.prepare(parsed, stage=stage)
            return engine.is_ready()

        if not self._began:
            self._began = True
            # All workers of an engine on a CPU have opened the memory that they share. vLLM leaves
            # 4 MB of it for each worker, however the engine ends.
            if engine := os.environ.get("VLLM_DIST_IDENT"):
                for path in Path("/dev/shm").glob(f"{glob.escape(engine)}-*cpushm_*"):
                    path.unlink(missing_ok=True)
        return _answer(prepare)

    def slipstream_is_ready(self) -> dict[str, Any]:
        """Checks a prepared update; the result is whether it can be received now."""
        return _answer(self.weight_transfer_engine.is_ready)

    def slipstream_room(self) -> dict[str, Any]:
        """Measures how many bytes an update may take in addition to the live weights."""
        return _answer(self.weight_transfer_engine.room)

    def slipstream_begin(self) -> dict[str, Any]:
        """Begins to copy the prepared update, without waiting; `slipstream_receive` ends it.

        The engine may take other calls before.
        """
        return _answer(self.weight_transfer_engine.begin_copies)

    def slipstream_receive(self) -> dict[str, Any]:
        """Receives and loads the prepared update; the result is a `LoadResult`'s fields."""

        def receive() -> dict[str, Any]:
            engine = self.weight_transfer_engine
            if engine.can_copy:
                engine.copy_weights()
            else:
                _load(self)
            engine.put_adapters_on()
            return asdict(engine.result)

        return _answer(receive)


def _answer(work: Callable[[], object]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except WeightSyncError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - raised again by `WeightUpdate`
        log.exception("a weight update failed")
        return {"error": f"{type(error).__name__}: {error}"}


def _load(worker: WorkerExtension) -> None:
    try:
        worker.start_weight_update()
        worker.update_weights({})
        worker.finish_weight_update()
    except BaseException:
        # Only a failing `update_weights` clears vLLM's flag of an open update.
        with contextlib.suppress(WeightSyncError, RuntimeError):
            worker.update_weights({"abandon": True})
        raise
