"""What a part of the controller is made of, and the making of the parts that extensions add."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slipstream.core.extension import active, resolve
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.results import RunResults
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.services.fleet_service import StatusServicer
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.access.checked_calls import Refusals


@dataclass(frozen=True)
class Kernel:
    """The objects that every controller has, one of each."""

    run: ControlledRun
    books: Books
    intake: Intake
    publisher: Publisher
    scheduler: Scheduler
    former: BatchFormer
    results: RunResults
    status: StatusServicer
    # Counts the calls to the controller that were refused.
    refusals: Refusals
    # The group of the tasks that parts start.
    tasks: asyncio.TaskGroup


def extension_parts(kernel: Kernel, *, precede_publisher: bool) -> list[Part]:
    """Makes the parts of the extensions that the settings ask for; imports no others.

    Parts that come before the publisher and those that come after it are made apart.
    """
    parts: list[Part] = []
    for extension in active(kernel.run.config):
        if extension.controller and extension.precedes_publisher == precede_publisher:
            part: Part | None = resolve(extension.controller)(kernel)
            if part is not None:
                parts.append(part)
    return parts
