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
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.extension import places_beside_model, resolve, transports
from slipstream.core.machine.description import free_memory
from slipstream.protocol.weights.buckets import Bucket, adapter_buckets, weight_buckets
from slipstream.protocol.weights.publish_waits import result_of, started
from slipstream.rollout_server.vllm import loader_update
from slipstream.rollout_server.vllm.adapter_slot import Arriving
from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import (
    BucketReceiver,
    GlooReceiver,
    Incoming,
    IpcReceiver,
    Staging,
    StorageReceiver,
    Update,
)
from slipstream.rollout_server.weights.copy_plan import CopyPlan, PlannedCopies
from slipstream.v1 import weights_pb2
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import reload

# A receiver joins as a rank, within seconds, on a device.
MakeReceiver: TypeAlias = Callable[
    [weights_pb2.Communicator, int, float, torch.device], BucketReceiver
]
TRANSPORTS: dict[str, MakeReceiver] = {
    "gloo": GlooReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "storage": StorageReceiver,
}

BACKEND = "slipstream"
# Parts of a device's memory that staged weights leave free for other allocations.
_LEFT_ON_GPU = 0.02
_LEFT_ON_CPU = 0.1


def receiver_of(transport: str) -> MakeReceiver:
    """Returns what makes receivers of a transport; raises WeightSyncError if there is none."""
    if transport in TRANSPORTS:
        return TRANSPORTS[transport]
    added = transports()
    if transport not in added:
        raise WeightSyncError(f"transport {transport!r} is not known here")
    receiver: MakeReceiver = resolve(added[transport].receiver)
    return receiver


class SlipstreamWeightTransfer:
    """Receives the buckets of a publish; copies them by a plan, or has vLLM load them.

    vLLM's worker makes it in place of a weight-transfer engine of its own, and shuts it down.
    """

    supports_draft_weight_update = False
    # vLLM's model runner, from the first call on.
    runner: Any = None

    # The id of the communicator, and its receiver, which joins on a thread while the engine
    # computes.
    _joining: tuple[str, Future[BucketReceiver]] | None = None
    # The update that was prepared; None before `prepare` and after an error.
    _update: Update | None = None
    # Memory for updates that arrive beside the live weights.
    _staging: Staging | None = None
    # The layout of later updates: its buckets of weights, and its adapters.
    _layout = b""
    _weights: tuple[Bucket, ...] = ()
    _adapters = Arriving()
    # The buckets for which recording a plan was tried, the plan, and its proved replay.
    _buckets: tuple[Bucket, ...] = ()
    _plan: CopyPlan | None = None
    _replay: PlannedCopies | None = None
    # Whether the weights in the model are those of a whole update.
    _is_whole = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.model = model

    def prepare(self, order: bytes, layout: bytes, first_rank: int, stage: bool) -> bool:
        """Prepares to receive an update; returns whether it can be received already.

        If `order` names a new communicator, begins to join it; `first_rank` is the rank of worker 0
        in it. `order` and `layout` are serialised. With `stage` the update is received into
        separate memory while the engine serves the old weights; `stage` has no effect unless
        `can_copy`. Raises WeightSyncError if the update cannot be received.
        """
        parsed = weights_pb2.PublishOrder.FromString(order)
        if parsed.new_communicator:
            self.shutdown()
        # The layout comes before joining: once all have joined, each bucket has its deadline.
        self._learn(layout)
        if parsed.new_communicator:
            self._join(parsed, first_rank)
        self._drop_update()
        if not self._weights and not self._is_whole:
            raise WeightSyncError("adapters came alone, but the weights before them did not arrive")
        communicator_id = parsed.communicator.communicator_id
        if self._joining is None or self._joining[0] != communicator_id:
            raise WeightSyncError(f"not a member of communicator {communicator_id!r}")
        stages = stage and self.can_copy
        incoming = Incoming(
            buckets=self._weights + self._adapters.buckets,
            bucket_deadline_s=parsed.bucket_deadline_s,
            own_buffers=stages or not self.can_copy,
        )
        if stages:
            self._staging = self._staging or Staging(self.device)
        self._update = Update(incoming, self._staging if stages else None, self._take, self.device)
        return self.is_ready()

    def is_ready(self) -> bool:
        """Returns whether an update can be received now. Raises WeightSyncError if it never can."""
        update = self._update
        if self._joining is None or update is None:
            raise WeightSyncError("no update was announced")
        joined = self._joining[1]
        if not joined.done():
            return False
        memory = update.prepare(result_of(joined))
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
        """Returns the bytes that an update may take in addition to the live weights.

        On a CPU the workers of an engine share main memory.
        """
        held_bytes = 0 if self._staging is None else self._staging.held_bytes
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return int(free + held_bytes - _LEFT_ON_GPU * total)
        free, total = free_memory()
        num_workers = self.vllm_config.parallel_config.world_size
        return int((free - _LEFT_ON_CPU * total) / num_workers) + held_bytes

    def begin(self) -> None:
        """Begins to copy the prepared update, without waiting; `receive` ends it.

        The engine may take other calls before.
        """
        if not self.can_copy:
            raise WeightSyncError("the update has no plan for its copies")
        with self._leaving_on_errors() as update:
            update.begin()

    def receive(self) -> dict[str, Any]:
        """Receives and loads the prepared update; returns how it was loaded.

        `receive_s` is the time for which the worker waited for buckets, and `load_s` the rest.
        `wire_s` is the time from the start of the first broadcast to the end of the last, or 0 if
        it cannot be measured. `by_plan` says that a copy plan loaded the update, `has_plan` that a
        plan will load the next update of this layout. `began_s` is when the device came to the
        copies, on the monotonic clock, or 0 after vLLM's loader.
        """
        by_plan = self.can_copy
        update = self._copied() if by_plan else self._loaded()
        began_s = update.began_s() if by_plan else 0.0
        # The update ends with the adapters that arrived with it.
        if self._adapters.buckets:
            self._adapters.put_on(self.model)
            self._wait_for_device()
        self._is_whole = True
        assert update.receiver is not None
        return {
            "digests": [digest.hex() for digest in update.digests],
            "by_plan": by_plan,
            "has_plan": self._replay is not None,
            "receive_s": update.receive_s,
            "load_s": time.perf_counter() - update.started_s - update.receive_s,
            "wire_s": update.receiver.take_wire().seconds,
            "began_s": began_s,
        }

    def _copied(self) -> Update:
        """Receives an update and copies it by the plan; after an error it must be sent again."""
        with self._leaving_on_errors() as update:
            update.finish()
        self._settle()
        # If the next update is like this one, it needs no `prepare`.
        self._update = update.following()
        return update

    def _loaded(self) -> Update:
        """Receives an update through vLLM's loader; later ones use the plan if it agrees.

        After an error the model needs a whole new update.
        """
        with self._leaving_on_errors() as update, set_current_vllm_config(self.vllm_config):
            self._update = None
            self._is_whole = False
            try:
                self._replay = loader_update.load(
                    self.model,
                    self.vllm_config.model_config,
                    update,
                    self._plan,
                    num_weights=len(self._weights),
                    keep_adapters=self._take,
                )
            except BaseException:
                # The reload keeps tensors that came: a second update would mix them with its own.
                reload.finalize_layerwise_reload(self.model, self.vllm_config.model_config)
                raise
            if self._replay is None:
                # The plan does not do what the loader did.
                self._plan = None
            self._settle()
        self.runner.reset_lora_state()
        return update

    def shutdown(self) -> None:
        """Leaves the communicator."""
        if self._replay is not None:
            self._replay.forget_buffers()
        if self._joining is not None:
            # At once, or as soon as the thread has joined.
            self._joining[1].add_done_callback(
                lambda joined: joined.exception() or joined.result().close()
            )
        self._drop_update()
        self._joining = None

    def _learn(self, layout: bytes) -> None:
        """Takes the serialised `WeightLayout` of later updates; records a copy plan if it is new.

        Recording may take longer than a bucket's deadline.
        """
        if layout == self._layout:
            return
        parsed = weights_pb2.WeightLayout.FromString(layout)
        self._weights = tuple(weight_buckets(parsed))
        buckets = tuple(adapter_buckets(parsed))
        number = max(1, len(parsed.adapter_names))
        self._adapters = Arriving(buckets, parsed.adapter_scale, number=number)
        if self._weights and self._weights != self._buckets:
            self._buckets = self._weights
            names = [span.tensor.name for bucket in self._weights for span in bucket.spans]
            for prefix, place in places_beside_model().items():
                if any(name.startswith(prefix) for name in names):
                    beside = resolve(place)
                    if not isinstance(self.model, beside):
                        self.model = beside(self.model, self.runner, loader_update.load_tensors)
            self._plan = self._replay = None
            self._plan = loader_update.recorded_plan(
                self.model, self._buckets, self.device, self.vllm_config
            )
        self._layout = layout

    def _join(self, order: weights_pb2.PublishOrder, first_rank: int) -> None:
        """Begins to join the communicator of `order`, on a thread.

        Raises WeightSyncError if the transport is unknown.
        """
        # The reload warns at every update of buffers that no checkpoint holds; we check parameters.
        logging.getLogger(reload.initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        where = order.communicator
        device = self.device
        receiver = receiver_of(where.transport)
        rank = first_rank + self.vllm_config.parallel_config.rank

        def join() -> BucketReceiver:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return receiver(where, rank, order.join_deadline_s, device)

        self._joining = where.communicator_id, started(join, name="weight-join")

    def _drop_update(self) -> None:
        if self._update is not None:
            self._update.abandon()
        self._update = None

    @contextlib.contextmanager
    def _leaving_on_errors(self) -> Iterator[Update]:
        """Leaves the communicator on any error: a half-received update cannot be resumed."""
        if self._update is None or self._update.receiver is None:
            raise WeightSyncError("no update was announced")
        try:
            yield self._update
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
    """The methods that vLLM adds to every worker; `self` is the worker."""

    weight_transfer_engine: SlipstreamWeightTransfer
    model_runner: Any
    _began = False

    def slipstream_disabled_features(self) -> dict[str, str]:
        """Returns why the worker's class does without features, by their names."""
        return dict(getattr(self, "disabled_features", {}))

    def slipstream_call(self, name: str, *arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Calls the method `name` of the worker's `SlipstreamWeightTransfer`.

        Returns {"value": its result} or {"error": message}, and never raises. With several workers
        vLLM would raise the first error and leave the answers of the others unread, for the next
        call to read.
        """
        engine = self.weight_transfer_engine
        if not self._began:
            self._began = True
            engine.runner = self.model_runner
            # All workers of an engine on a CPU have opened the memory that they share. vLLM leaves
            # 4 MB of it for each worker, however the engine ends.
            if shared := os.environ.get("VLLM_DIST_IDENT"):
                for path in Path("/dev/shm").glob(f"{glob.escape(shared)}-*cpushm_*"):
                    path.unlink(missing_ok=True)
        try:
            return {"value": getattr(engine, name)(*arguments)}
        except WeightSyncError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - raised again by `WeightUpdate`
            loader_update.log.exception("a weight update failed")
            return {"error": f"{type(error).__name__}: {error}"}
