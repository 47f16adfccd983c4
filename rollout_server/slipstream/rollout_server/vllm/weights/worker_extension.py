"""The calls that vLLM's workers answer in addition to vLLM's own.

vLLM imports this module in every worker (`worker_extension_cls`), and with it the weight-transfer
engine, which registers itself.
"""

import contextlib
import glob
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.vllm.weights.loader_update import log
from slipstream.rollout_server.vllm.weights.weight_receiver import (
    JoinInfo,
    SlipstreamWeightTransfer,
)
from slipstream.v1 import weights_pb2


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
            _unlink_shared_memory()
            self._began = True
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


def _unlink_shared_memory() -> None:
    """Removes the names of the memory that the workers of an engine on a CPU share.

    All workers have opened it by now. vLLM leaves 4 MB for each worker, however the engine ends.
    """
    if engine := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{glob.escape(engine)}-*cpushm_*"):
            path.unlink(missing_ok=True)


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
