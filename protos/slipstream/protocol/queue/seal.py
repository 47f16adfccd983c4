"""Seals on trajectories: the controller can tell which server epoch a delivery comes from.

The controller draws one key for a run and gives each server epoch a key of its own, made from it,
with the welcome. A server seals what it delivers; nobody else can seal for that epoch. Nothing is
kept for an epoch, so what waited in a queue while the controller was away is recognised too.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable
from typing import TypeAlias

from slipstream.protocol.bounds import shown
from slipstream.protocol.errors import ProtocolError
from slipstream.protocol.types import TrajectoryId, TrajectoryName

SEAL_BYTES = 16
MAX_KEYS = 4096
# Seals of smaller deliveries are checked where they are received, those of others in a thread.
SMALL_BYTES = 256 << 10

# What a delivery holds without its seal; None: whoever sealed it is not the server it names.
OpenSeal: TypeAlias = Callable[[TrajectoryId, bytes], bytes | None]


def server_key(run_key: bytes, epoch: int) -> bytes:
    """The key of one server epoch, 32 bytes."""
    return hmac.digest(run_key, epoch.to_bytes(8, "little"), "sha256")


def seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    """`data` behind the seal of the epoch that has `key`."""
    return _seal(key, trajectory_id, data) + data


def opener(run_key: bytes) -> OpenSeal:
    """Opens what the server epochs of a run have sealed; the id names the epoch."""
    # Of the epochs that deliver now; making one again costs little.
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
    """The error of a delivery that its seal does not fit."""
    return ProtocolError(
        f"trajectory {shown(trajectory_id)} is not sealed by the server that it names"
    )


def without_seal(_: TrajectoryId, data: bytes) -> bytes:
    """Takes data as it is: for queues that carry no sealed trajectories."""
    return data


def _seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    mac = hashlib.blake2b(key=key, digest_size=SEAL_BYTES)
    mac.update(trajectory_id.encode() + b"\0")
    mac.update(data)
    return mac.digest()
