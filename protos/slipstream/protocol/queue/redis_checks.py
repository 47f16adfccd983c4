"""Checks of a Redis server: does it keep acknowledged writes, and has each user its rights?

There is one user for each end of the queue. The rollout server only adds trajectories and counts
their bytes; the controller reads them, deletes them, and makes the stream. Rights on single keys
need selectors: Redis 7 or Valkey.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError
from slipstream.core.errors import QueueError
from slipstream.core.settings.queue_section import QueueEnd
from slipstream.protocol.queue.redis_connection import RedisConnection

REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    # With "yes" nothing is synced while the append-only file is rewritten.
    "no-appendfsync-on-rewrite": "no",
}
# First versions that load all transactions from the append-only file. Earlier versions
# from 7.0 on silently drop each transaction that the default user may not write.
LOADS_WHOLE_FROM = {"redis": (8, 6, 3), "valkey": (9, 1, 2)}
ASKS_DEFAULT_USER_FROM = (7, 0)

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


async def check_loading(connection: RedisConnection) -> None:
    """Raises QueueError when the server would drop the run's transactions at its next start."""
    kind, version = await server_version(connection.client)
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    whole_from = LOADS_WHOLE_FROM.get(kind)
    if numbers < ASKS_DEFAULT_USER_FROM or (whole_from is not None and numbers >= whole_from):
        return
    if connection.user == "default":
        return
    run = connection.mark_key.removesuffix(":mark")
    for command in (
        ("SET", f"{run}:mark", ""),
        ("XADD", f"{run}:trajectories", "*", "id", ""),
        ("INCRBY", f"{run}:mark:MARK:added", "1"),
        ("INCRBY", f"{run}:mark:MARK:removed", "1"),
        ("XACK", f"{run}:trajectories", "controller", "0-1"),
        ("XDEL", f"{run}:trajectories", "0-1"),
    ):
        call = connection.client.execute_command("ACL", "DRYRUN", "default", *command)  # type: ignore[no-untyped-call]
        answer = await call
        if _text(answer) != "OK":
            raise QueueError(
                f"redis at {connection.name}: version {version} ({kind}) loses transactions at a "
                f"restart, since its default user may not {command[0].lower()}: put "
                f"`{DEFAULT_USER}` into its access list, which lets nobody in as that user, or use "
                f"{' or '.join(f'{k} from {_dotted(v)} on' for k, v in LOADS_WHOLE_FROM.items())}"
            )


async def server_version(client: redis.asyncio.Redis) -> tuple[str, str]:
    """Returns the server's kind, redis or valkey, and its version."""
    hello = client.execute_command("HELLO", "2")  # type: ignore[no-untyped-call]
    facts: list[bytes] = await hello
    kind, version = (facts[facts.index(key) + 1] for key in (b"server", b"version"))
    return kind.decode(), version.decode()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


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
