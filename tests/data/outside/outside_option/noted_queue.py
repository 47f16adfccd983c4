"""A queue that notes in the run's folder what goes through it."""

from collections.abc import Sequence

import grpc.aio
from slipstream.core.settings.config import Config
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.grpc import GrpcSender

NOTES = "noted-trajectories.txt"


class NotedSender(GrpcSender):
    """Sends trajectories by calls to the controller, and writes their ids into a file."""

    def __init__(
        self,
        config: Config,
        channel: grpc.aio.Channel,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        super().__init__(channel, metadata, config.queue.max_bytes)
        self._notes = config.run_dir / NOTES

    async def put(
        self,
        trajectory_id: TrajectoryId,
        data: bytes,
        *,
        timeout_s: float,
        tokens: int = 0,
    ) -> None:
        """Stores a trajectory, and its id as a line of the file."""
        await super().put(trajectory_id, data, timeout_s=timeout_s, tokens=tokens)
        with self._notes.open("a") as notes:
            notes.write(f"{trajectory_id}\n")


def sender(
    config: Config,
    channel: grpc.aio.Channel,
    metadata: Sequence[tuple[str, str]],
    _run_id: str,
) -> NotedSender:
    """Returns the sender of a rollout server."""
    return NotedSender(config, channel, metadata)
