"""Deliveries that can be no trajectories of this run: each into a file, with its cause.

Pure but for the files: who was to blame, and whether a server produces nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.codec import MAX_TRAJECTORY_BYTES
from slipstream.protocol.names import is_server_id
from slipstream.protocol.queue.base import Delivery
from slipstream.protocol.types import ServerId, TrajectoryId, TrajectoryName
from slipstream.v1 import trajectory_pb2

# Of one server, without a good one in between: then the run stops.
MAX_IN_A_ROW = 16
# More are journaled, without a file.
MAX_FILES = 1000
UNKNOWN = ServerId("unknown")


@dataclass(frozen=True)
class Claim:
    """What a delivery says of itself, as far as it can be read; not to be trusted."""

    trajectory_id: TrajectoryId
    # None: the id is not one that servers make.
    name: TrajectoryName | None
    server: ServerKey
    # Sampled tokens.
    tokens: int
    will_retry: bool


def read_claim(delivery: Delivery, known: Set[ServerKey], *, largest_bytes: int) -> Claim:
    """What can be read; `known` servers are recognised by the epoch in the id alone.

    A delivery of more than `largest_bytes` is not decoded: its id is all that is read. Never fails.
    """
    name = TrajectoryName.parse(delivery.trajectory_id)
    by_epoch = {key.epoch: key for key in known}
    epoch = 0 if name is None else name.epoch
    server = by_epoch.get(epoch, ServerKey(UNKNOWN, epoch))
    unread = Claim(delivery.trajectory_id, name, server, 0, False)
    if len(delivery.data) > largest_bytes:
        return unread
    message = trajectory_pb2.Trajectory()
    try:
        message.ParseFromString(delivery.data)
    except DecodeError:
        return unread
    if server.server_id == UNKNOWN and is_server_id(message.server_id):
        server = ServerKey(ServerId(message.server_id), message.server_epoch)
    return Claim(
        delivery.trajectory_id,
        name,
        server,
        min(sum(message.run_lengths[1::2]), MAX_TRAJECTORY_BYTES // 4),
        message.will_retry,
    )


class Quarantine:
    """The folder, and how often in a row each server was to blame."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when it is needed."""
        self._folder = folder
        self._in_a_row: Counter[ServerKey] = Counter()
        self.total = 0

    def add(self, delivery: Delivery, claim: Claim, cause: str) -> Path | None:
        """Writes data and cause; where to. None: there are too many already.

        It counts also where an OSError says that it could not be written.
        """
        self._in_a_row[claim.server] += 1
        self.total += 1
        if self.total > MAX_FILES:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9.-]", "_", delivery.trajectory_id)[:150]
        path = self._folder / f"{name}.pb"
        path.write_bytes(delivery.data)
        facts = {
            "id": delivery.trajectory_id,
            "cause": cause,
            "server": claim.server.server_id,
            "epoch": f"{claim.server.epoch:x}",
            "tokens": claim.tokens,
            "bytes": len(delivery.data),
        }
        path.with_name(f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
        return path

    def good(self, server: ServerKey) -> None:
        """A server produced something that can be trained."""
        self._in_a_row.pop(server, None)

    def is_hopeless(self, server: ServerKey) -> bool:
        """Whether a server produces nothing else."""
        return self._in_a_row[server] >= MAX_IN_A_ROW
