"""Seals trajectories with MACs, which prove to the controller which server epoch sent a delivery.

The controller draws one key for a run, derives a key for each server epoch, and sends that key to
the server with the welcome. A server seals its deliveries; no other process can seal for that
epoch. The controller stores nothing for an epoch, so it also recognises deliveries that waited
while it was away.
"""

import functools
import hashlib
import hmac
from collections.abc import Callable
from typing import TypeAlias

from slipstream.core.errors import ProtocolError
from slipstream.core.types import TrajectoryId, TrajectoryName
from slipstream.protocol.bounds import shown

SEAL_BYTES = 16
MAX_KEYS = 4096
# Seals of deliveries up to this size are checked on the event loop, of larger ones in a thread.
SMALL_BYTES = 256 << 10

# Returns a delivery without its seal, or None if the seal is not the named server's.
OpenSeal: TypeAlias = Callable[[TrajectoryId, bytes], bytes | None]


def server_key(run_key: bytes, epoch: int) -> bytes:
    """Returns the key of one server epoch, 32 bytes."""
    return hmac.digest(run_key, epoch.to_bytes(8, "little"), "sha256")


def seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    """Returns `data` preceded by its seal, which is made with an epoch's `key`."""
    return _seal(key, trajectory_id, data) + data


def opener(run_key: bytes) -> OpenSeal:
    """Returns a function that opens the seals of all epochs, which the trajectory ids name."""
    # The keys of epochs that deliver now; making one again costs little.
    key_of = functools.lru_cache(MAX_KEYS)(functools.partial(server_key, run_key))

    def open_seal(trajectory_id: TrajectoryId, sealed: bytes) -> bytes | None:
        name = TrajectoryName.parse(trajectory_id)
        if name is None:
            return None
        data = sealed[SEAL_BYTES:]
        expected = _seal(key_of(name.epoch), trajectory_id, data)
        return data if hmac.compare_digest(expected, sealed[:SEAL_BYTES]) else None

    return open_seal


def not_sealed(trajectory_id: TrajectoryId) -> ProtocolError:
    """Returns the error of a delivery with a wrong seal."""
    return ProtocolError(
        f"trajectory {shown(trajectory_id)} is not sealed by the server that it names"
    )


def without_seal(_: TrajectoryId, data: bytes) -> bytes:
    """Returns `data` unchanged, for queues without seals."""
    return data


def _seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    mac = hashlib.blake2b(key=key, digest_size=SEAL_BYTES)
    mac.update(trajectory_id.encode() + b"\0")
    mac.update(data)
    return mac.digest()
