"""Rights on the Redis of a run: one user for each end of the queue.

The rollout server only adds trajectories and counts their bytes; the controller reads them, deletes
them, and makes the stream. Rights on single keys need selectors: Redis 7 or Valkey.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.core.settings.queue_section import QueueEnd

# Commands that a client sends before and around its own commands.
_CONNECTION = "+auth +hello +ping +select +client|setname +multi +exec +discard +unwatch"
_STREAM, _MARKS = "~slipstream:*:trajectories", "%R~slipstream:*:mark*"
# The stream of a run that does not exist.
_PROBED = "slipstream:probe:trajectories"


@dataclass(frozen=True)
class QueueRole:
    """One end of the queue."""

    # Name of the user that the embedded server and deploy/make_certificates.sh make.
    user: str
    # Arguments of ACL SETUSER, without the password.
    rules: str
    # A command that writes in this role, and changes nothing where no stream is.
    probe: tuple[str, ...]


ROLLOUT_SERVER = QueueRole(
    user="rollout",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} (+xadd {_STREAM}) "
        f"(+watch +incrby ~slipstream:*:mark:*:added) (+get +mget {_MARKS})"
    ),
    probe=("XADD", _PROBED, "NOMKSTREAM", "*", "id", ""),
)
CONTROLLER = QueueRole(
    user="controller",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} +config|get +acl|dryrun "
        f"(+xgroup|create +xreadgroup +xrange +xack +xdel {_STREAM}) "
        f"(+set ~slipstream:*:mark) (+incrby ~slipstream:*:mark:*:removed) (+get +mget {_MARKS})"
    ),
    probe=("XDEL", _PROBED, "0-1"),
)
# No client logs in as this user. But many servers load transactions from their files with its
# rights, and silently drop the transactions that it may not write.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
ROLES: Mapping[QueueEnd, QueueRole] = {"controller": CONTROLLER, "rollout_server": ROLLOUT_SERVER}
