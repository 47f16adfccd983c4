"""What vLLM's workers answer beside their own calls.

vLLM imports this module in every worker (`worker_extension_cls`), and with it the weight-transfer
engine, which registers itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slipstream.protocol.errors import WeightSyncError
from slipstream.rollout_server.weight_receiver import JoinInfo, SlipstreamWeightTransfer
from slipstream.v1 import weights_pb2


class WorkerExtension:
    """Calls that every vLLM worker answers beside its own; `self` is the worker."""

    weight_transfer_engine: SlipstreamWeightTransfer
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def slipstream_prepare(self, order: bytes, layout: bytes, first_rank: int, stage: bool) -> bool:
        """Begins to join if the order says so; whether its update can be received already."""
        parsed = weights_pb2.PublishOrder.FromString(order)
        if parsed.new_communicator:
            self.init_weight_transfer_engine(asdict(JoinInfo(order, first_rank)))
        self.weight_transfer_engine.prepare(parsed, layout, stage=stage)
        return self.weight_transfer_engine.is_ready()

    def slipstream_is_ready(self) -> bool:
        """Whether the announced update can be received now."""
        return self.weight_transfer_engine.is_ready()

    def slipstream_receive(self) -> dict[str, Any]:
        """Takes the announced update, from the first bucket to the last copy: a `LoadResult`."""
        engine = self.weight_transfer_engine
        if engine.has_plan:
            engine.copy_weights()
            return asdict(engine.result)
        try:
            self.start_weight_update()
            self.update_weights({})
            self.finish_weight_update()
        except BaseException:
            # Only a failing `update_weights` clears vLLM's flag of an open update.
            with contextlib.suppress(WeightSyncError, RuntimeError):
                self.update_weights({"abandon": True})
            raise
        return asdict(engine.result)

    def slipstream_refresh_kept_linears(self, enabled: bool) -> None:
        """Turns the repacking of tied heads on or off, to show what it is for."""
        self.weight_transfer_engine.refresh_kept_linears = enabled
