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

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.vllm.weights.loader_update import log
from slipstream.rollout_server.vllm.weights.weight_receiver import (
    JoinInfo,
    SlipstreamWeightTransfer,
)
from slipstream.rollout_server.weights.direct_line import WorkerEnd
from slipstream.v1 import weights_pb2


class WorkerExtension:
    """The methods that vLLM adds to every worker; `self` is the worker.

    Each method with a `call` returns {"value": its result} or {"error": message}, and never raises.
    With several workers vLLM would raise the first error and leave the answers of the others
    unread, for the next call to read. `call` is the number under which `DirectLine` receives the
    same answer.
    """

    weight_transfer_engine: SlipstreamWeightTransfer
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    synchronize_device: Callable[[], None]
    _line: WorkerEnd | None = None
    _pausing = ""

    def slipstream_prepare(
        self, call: int, order: bytes, layout: bytes, first_rank: int, stage: bool
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

        engine = self.weight_transfer_engine
        if self._line is None:
            _unlink_shared_memory()
            self._line = WorkerEnd(engine.parallel_config.rank)
            methods = (self.slipstream_begin, self.slipstream_finish)
            self._line.serve({m.__name__: _enqueueing(m, engine.device) for m in methods})
        return self._answer(call, prepare)

    def slipstream_is_ready(self, call: int) -> dict[str, Any]:
        """Checks a prepared update; the result is whether it can be received now."""
        return self._answer(call, self.weight_transfer_engine.is_ready)

    def slipstream_room(self, call: int) -> dict[str, Any]:
        """Measures how many bytes an update may take in addition to the live weights."""
        return self._answer(call, self.weight_transfer_engine.room)

    def slipstream_begin(self, call: int, pausing: str = "") -> dict[str, Any]:
        """Begins to copy the prepared update, without waiting; `slipstream_finish` ends it.

        `pausing` is the mark that the worker sends to the server once the engine has paused. An
        empty `pausing` means that the engine is idle: then this may run outside the engine's
        thread. The engine may take other calls before `slipstream_finish`.
        """

        def begin() -> None:
            self._tell_when_paused(pausing)
            self.weight_transfer_engine.begin_copies()

        return self._answer(call, begin)

    def slipstream_finish(self, call: int) -> dict[str, Any]:
        """Finishes the update that `slipstream_begin` began; the result is a `LoadResult`'s fields.

        This method may run outside the engine's thread: the engine plans no step before the server
        has the answer.
        """

        def finish() -> dict[str, Any]:
            engine = self.weight_transfer_engine
            engine.copy_weights()
            # vLLM forgets adapters when it loads weights.
            engine.put_adapters_on()
            return asdict(engine.result)

        return self._answer(call, finish)

    def slipstream_receive(self, call: int) -> dict[str, Any]:
        """Receives and loads the prepared update; the result is a `LoadResult`'s fields."""

        def receive() -> dict[str, Any]:
            engine = self.weight_transfer_engine
            if engine.can_copy:
                engine.copy_weights()
            else:
                _load(self)
            engine.put_adapters_on()
            return asdict(engine.result)

        return self._answer(call, receive)

    def _tell_when_paused(self, mark: str) -> None:
        """Sends `mark` to the server when vLLM synchronises the device, which completes a pause.

        While new weights are copied the synchronisation is skipped: the steps before the copies
        have ended, and the engine preempts its requests meanwhile.
        """
        self._pausing = mark
        if "synchronize_device" in vars(self):
            return
        wait_for_device = self.synchronize_device

        def wait_and_tell() -> None:
            if not self.weight_transfer_engine.is_copying:
                wait_for_device()
            if self._line is not None and self._pausing:
                self._line.tell(self._pausing)

        self.synchronize_device = wait_and_tell

    def _answer(self, call: int, work: Callable[[], object]) -> dict[str, Any]:
        try:
            answer = {"value": work()}
        except WeightSyncError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - raised again by `WeightUpdate`
            log.exception("a weight update failed")
            answer = {"error": f"{type(error).__name__}: {error}"}
        if self._line is not None:
            self._line.answer(call, answer)
        return answer


def _unlink_shared_memory() -> None:
    """Removes the names of the memory that the workers of an engine on a CPU share.

    All workers have opened it by now. vLLM leaves 4 MB for each worker, however the engine ends.
    """
    if engine := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{glob.escape(engine)}-*cpushm_*"):
            path.unlink(missing_ok=True)


def _enqueueing(work: Callable[[int], object], device: torch.device) -> Callable[[int], object]:
    """Returns `work`, to be called in another thread, bound to the current CUDA stream.

    Call this in the engine's thread.
    """
    if device.type == "cpu":
        return work
    stream = torch.cuda.current_stream(device)

    def on_stream(call: int) -> object:
        # The stream's device becomes the thread's too.
        with torch.cuda.stream(stream):
            return work(call)

    return on_stream


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
