"""Quarantine of deliveries that cannot be trajectories of this run: a file each, with its cause.

Also counts the quarantined deliveries in a row of each server. Pure except for the files.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from slipstream.core.names import is_server_id
from slipstream.core.types import ServerId, TrajectoryId, TrajectoryName
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.codec import MAX_TRAJECTORY_BYTES
from slipstream.protocol.queue.base import Delivery
from slipstream.v1 import trajectory_pb2

# Quarantined deliveries of one server in a row after which that server is sent away.
MAX_IN_A_ROW = 16
# Largest number of files; further deliveries are only journaled.
MAX_FILES = 1000
# Largest number of servers whose deliveries in a row are counted; the oldest count goes first.
MAX_SERVERS = 1000
UNKNOWN = ServerId("unknown")


@dataclass(frozen=True)
class Claim:
    """The facts that an untrusted delivery states about itself, as far as they can be read."""

    trajectory_id: TrajectoryId
    # Parsed id. None if servers make no such id.
    name: TrajectoryName | None
    server: ServerKey
    # Number of sampled tokens.
    tokens: int
    will_retry: bool


def read_claim(delivery: Delivery, known: ServerEpochs, *, largest_bytes: int) -> Claim:
    """Reads the claim of a delivery; `known` servers are recognised by the epoch in the id alone.

    A delivery of more than `largest_bytes` is not decoded: only its id is read. Never raises.
    """
    name = TrajectoryName.parse(delivery.trajectory_id)
    epoch = 0 if name is None else name.epoch
    server = known.server_of(epoch) or ServerKey(UNKNOWN, epoch)
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
    """The folder of quarantined deliveries, and their number in a row for each server."""

    def __init__(self, folder: Path, *, max_files: int = MAX_FILES) -> None:
        """`folder` is created when the first delivery comes."""
        self._folder, self._max_files = folder, max_files
        self._in_a_row: Counter[ServerKey] = Counter()
        self.total = 0

    def add(self, delivery: Delivery, claim: Claim, cause: str) -> Path | None:
        """Writes data and cause; returns the path, None above `max_files`.

        The delivery is counted even when this raises OSError because it cannot be written.
        """
        self._in_a_row[claim.server] += 1
        if len(self._in_a_row) > MAX_SERVERS:
            del self._in_a_row[next(iter(self._in_a_row))]
        self.total += 1
        if self.total > self._max_files:
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
        """Notes that a server delivered a good trajectory: its count in a row starts again."""
        self._in_a_row.pop(server, None)

    def is_hopeless(self, server: ServerKey) -> bool:
        """Whether the last `MAX_IN_A_ROW` deliveries of a server were all quarantined."""
        return self._in_a_row[server] >= MAX_IN_A_ROW
