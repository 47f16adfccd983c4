"""The users of a Redis server with their rights, and a check that it keeps what it acknowledges.

There is one user for each end of the queue. The rollout server only adds trajectories and counts
their bytes; the controller reads them, deletes them, and makes the stream. Rights on single keys
need selectors: Redis 7 or Valkey.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from redis.exceptions import NoPermissionError, ResponseError
from slipstream.core.errors import QueueError
from slipstream.core.settings.sections import QueueEnd
from slipstream.protocol.queue.redis_connection import RedisConnection

REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    # With "yes" nothing is synced while the append-only file is rewritten.
    "no-appendfsync-on-rewrite": "no",
}

logger = logging.getLogger(__name__)


async def check_settings(connection: RedisConnection) -> None:
    """Raises QueueError when the server may lose acknowledged writes."""
    try:
        found = await connection.client.config_get(*REQUIRED_SETTINGS)
    except (NoPermissionError, ResponseError) as error:
        needed = ", ".join(f"{key} {value}" for key, value in REQUIRED_SETTINGS.items())
        logger.warning(
            "redis at %s does not show its settings (%s): %s are needed, or trajectories may "
            "be lost",
            connection.name,
            error,
            needed,
        )
        return
    settings = {_text(key): _text(value) for key, value in found.items()}
    for setting, needed in REQUIRED_SETTINGS.items():
        value = settings.get(setting)
        if value != needed:
            raise QueueError(
                f"redis at {connection.name}: {setting} must be {needed} so that nothing is lost, "
                f"got {value}"
            )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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
        f"resetkeys resetchannels -@all {_CONNECTION} +config|get "
        f"(+xgroup|create +xreadgroup +xrange +xack +xdel {_STREAM}) "
        f"(+set ~slipstream:*:mark) (+incrby ~slipstream:*:mark:*:removed) (+get +mget {_MARKS})"
    ),
    probe=("XDEL", _PROBED, "0-1"),
)
# No client logs in as this user. But many servers load transactions from their files with its
# rights, and silently drop the transactions that it may not write.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
ROLES: Mapping[QueueEnd, QueueRole] = {"controller": CONTROLLER, "rollout_server": ROLLOUT_SERVER}
