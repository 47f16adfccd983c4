"""What a part of the controller may do at the events of a run."""

from collections.abc import Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeAlias

import grpc.aio
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.servers.fleet import ServerListener
from slipstream.learner.controller.trajectories.formed_batch import SetAside, StepOrder, Trained
from slipstream.v1 import trainer_pb2

# Coroutines that run until they are cancelled, by the names of their tasks.
Tasks: TypeAlias = Mapping[str, Coroutine[Any, Any, None]]


class Part(ServerListener):
    """A part of the controller; it overrides the methods for what it takes part in."""

    def restore(self, history: RunHistory) -> None:
        """Takes over the state that `history` has of this part, before any server connects."""

    def tasks(self) -> Tasks:
        """Returns what the part does besides, from the first server to the end of the run."""
        return {}

    def beside(self) -> AbstractAsyncContextManager[None]:
        """Returns a context for the time from the first call that is served to the end."""
        return nullcontext()

    def trainer_asks(self, receivers: Collection[str]) -> None:
        """Handles a trainer that asks for an order; servers `receivers` get its weights now."""

    def order(self, trainer: trainer_pb2.NextRequest) -> trainer_pb2.Directive | bytes | None:
        """Returns an order, or one encoded, for a trainer without servers to send weights to."""
        return None

    def next_step(self) -> StepOrder | None:
        """Returns the step that a client orders, in place of a batch of groups."""
        return None

    def waits_for(self) -> str:
        """Returns what the next step waits for, for users, or "" if that are groups."""
        return ""

    def computed(self, report: trainer_pb2.PassReport) -> None:
        """Handles the result of a pass."""

    def saved(self, step: int) -> None:
        """Handles a checkpoint of version `step`."""

    def set_aside(self, set_aside: SetAside) -> None:
        """Handles a batch that the trainer could not train."""

    def serve(self, server: grpc.aio.Server) -> None:
        """Adds the services of this part to the controller's server."""

    async def before_batch(self) -> None:
        """Returns when the trainer may compute; it then gets its batch."""

    async def before_stop(self) -> None:
        """Returns when the trainer may save and leave; it then gets its last order."""

    async def close_files(self) -> None:
        """Ends the part's writes to the run's folder, of whose files the summary gets digests."""

    def is_done(self) -> bool:
        """Whether the run may end: a controller that resumes it has no trainer for what is left."""
        return True

    def trainer_away(self) -> None:
        """Handles the end of the trainer's stream; it, or another trainer, may come back."""

    async def trainer_ended(self) -> None:
        """Handles a trainer that is over: it told why, or another one has registered."""

    def stored(self, report: trainer_pb2.StoredReport) -> trainer_pb2.StoredReceipt | None:
        """Handles the result of an order to store weights; returns the receipt of its part."""
        return None

    def stepped(
        self, trained: Trained, report: trainer_pb2.StepReport, given_s: float | None
    ) -> None:
        """Handles a step whose batch the trainer got at `given_s`, by the monotonic clock.

        It is None if an earlier controller gave the batch.
        """
