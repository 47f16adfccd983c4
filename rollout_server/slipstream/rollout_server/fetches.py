"""Orders to fetch weights from storage."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from slipstream.v1 import fleet_pb2

# Called with a report on a publish.
Report: TypeAlias = Callable[[fleet_pb2.PublishReport], None]
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


class Fetches:
    """The orders to fetch of one session; this server takes its weights from the trainer.

    `FetchOrders` carries them out.
    """

    def __init__(self, report: Report, group: asyncio.TaskGroup) -> None:
        self._report, self._group = report, group

    def start(self, order: fleet_pb2.PreparePublish) -> None:
        """Begins to fetch the version of `order`; reports READY or FAILED later."""
        said = "no weights.storage_url is set here"
        self._report(
            fleet_pb2.PublishReport(publish_id=order.publish_id, phase=FAILED, message=said)
        )

    def completed(self, message: fleet_pb2.ControllerMessage) -> fleet_pb2.ControllerMessage:
        """Returns each message, a receive order with what was fetched for it."""
        return message

    def note(self, report: fleet_pb2.PublishReport) -> None:
        """Handles a report of this server on a publish."""

    def close(self) -> None:
        """Abandons an unfinished fetch."""


# Opens the orders of one session, whose tasks run in the group.
OpenFetches: TypeAlias = Callable[[Report, asyncio.TaskGroup], Fetches]
