"""The controller's orders to fetch a version from storage, carried out while the engine serves.

Consumes: questions that name a version in storage. Produces: one report for each, READY or FAILED.
Waits for: the storage, on a thread. Unblocked by: the end of the fetch, a newer question, `close`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.deltas import content_name
from slipstream.rollout_server.stored_weights import Fetched, StoredWeights
from slipstream.v1 import fleet_pb2

log = logging.getLogger(__name__)

FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING


class FetchOrders:
    """Fetches one version at a time, and completes the order to load it.

    fetches = FetchOrders(stored, report, group)
    fetches.start(prepare)  # reports READY or FAILED later
    order = fetches.completed(receive)  # with the layout and the file
    fetches.close()
    """

    def __init__(
        self,
        stored: StoredWeights | None,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> None:
        """`stored`: None for a server that takes its weights from the trainer."""
        self._stored, self._report, self._group = stored, report, group
        self._abandoned = threading.Event()
        # The publish whose version lies in the file.
        self._ready: tuple[str, Fetched] | None = None
        # The name of what the engine serves, if it takes changes of that; b"" during an update.
        self._served = b""

    def start(self, order: fleet_pb2.PreparePublish) -> None:
        """Begins to fetch a version; abandons the fetch before it."""
        self._abandoned.set()
        self._abandoned, self._ready = threading.Event(), None
        self._group.create_task(self._fetch(order, self._abandoned))

    def completed(self, message: fleet_pb2.ControllerMessage) -> fleet_pb2.ControllerMessage:
        """Returns an order with what only this server knows: layout, file, and changes in it.

        A probe that failed is noted as an update that failed. After an abort the engine gets a
        whole version.
        """
        kind = message.WhichOneof("message")
        if kind == "abort":
            self._served = b""
        if kind == "probe_verdict" and not message.probe_verdict.passed:
            self._forget()
        if kind != "receive" or self._ready is None:
            return message
        order, (publish_id, fetched) = message.receive.order, self._ready
        if order.communicator.transport == "storage" and order.publish_id == publish_id:
            message.receive.layout.CopyFrom(fetched.layout)
            order.communicator.path = str(fetched.path.resolve())
            if fetched.delta is not None:
                order.delta.CopyFrom(fetched.delta)
        self._served = b""
        return message

    def note(self, report: fleet_pb2.PublishReport) -> None:
        """Notes what the engine serves; forgets the fetched version if it could not load that."""
        if report.phase == FAILED:
            self._forget()
        elif report.phase == SERVING and report.stages.takes_deltas:
            self._served = content_name(report.bucket_digests)

    def close(self) -> None:
        """Abandons the fetch under way."""
        self._abandoned.set()

    def _forget(self) -> None:
        self._served = b""
        if self._stored is not None:
            self._stored.forget()

    async def _fetch(self, order: fleet_pb2.PreparePublish, abandoned: threading.Event) -> None:
        report = fleet_pb2.PublishReport(publish_id=order.publish_id)
        try:
            if self._stored is None:
                raise WeightSyncError('rollout_server.weights_from is not "storage" here')
            arguments = order.stored, abandoned, self._served
            fetched = await asyncio.to_thread(self._stored.fetch, *arguments)
        except WeightSyncError as error:
            report.phase, report.message = FAILED, str(error)
        else:
            if abandoned.is_set():
                return
            self._ready = order.publish_id, fetched
            report.phase = fleet_pb2.PUBLISH_PHASE_READY
            report.stages.fetch_s = fetched.seconds
            report.stages.fetched_bytes = fetched.num_bytes
            report.stages.fetched_links = fetched.num_links
            log.info(
                "fetched version %d in %.1f s: %d bytes, %d links; the engine takes %s",
                *(order.version.step, fetched.seconds, fetched.num_bytes, fetched.num_links),
                "all of it" if fetched.delta is None else "what changed",
            )
        self._report(report)
