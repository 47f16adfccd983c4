"""Rights on the Redis of a run: one user for each end of the queue.

The rollout server only adds trajectories and counts their bytes; the controller reads them, deletes
them, and makes the stream. Rights on single keys need selectors: Redis 7 or Valkey.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from slipstream.core.settings.queue_section import QueueEnd

Command: TypeAlias = tuple[str, ...]

# Commands that a client sends before and around its own commands.
_CONNECTION = "+auth +hello +ping +select +client|setname +multi +exec +discard +unwatch"
_STREAM, _MARKS = "~slipstream:*:trajectories", "%R~slipstream:*:mark*"
# Keys of a run that does not exist.
_STREAM_KEY = "slipstream:examination:trajectories"
_MARK_KEY = "slipstream:examination:mark"
_ADDED_KEY, _REMOVED_KEY = f"{_MARK_KEY}:MARK:added", f"{_MARK_KEY}:MARK:removed"


@dataclass(frozen=True)
class QueueRole:
    """One end of the queue.

    `needed` and `forbidden` are commands that show whether a user has the rights. Each would be
    harmless if it ran.
    """

    # Name of the user that the embedded server and deploy/make_certificates.sh make.
    user: str
    # Arguments of ACL SETUSER, without the password.
    rules: str
    needed: tuple[Command, ...]
    forbidden: tuple[Command, ...]


_NOBODY: tuple[Command, ...] = (
    ("FLUSHALL", "NEVER"),
    ("KEYS", _STREAM_KEY),
    ("CONFIG", "SET", "no-such-setting", "0"),
    ("EVAL", "return 1", "0"),
    ("ACL", "LIST"),
    ("DEL", _STREAM_KEY),
    ("XTRIM", _STREAM_KEY, "MAXLEN", "1000"),
    ("GET", "somebody-elses"),
    ("XADD", "somebody-elses", "NOMKSTREAM", "*", "id", ""),
)

ROLLOUT_SERVER = QueueRole(
    user="rollout",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} (+xadd {_STREAM}) "
        f"(+watch +incrby ~slipstream:*:mark:*:added) (+get +mget {_MARKS})"
    ),
    needed=(
        ("WATCH", _ADDED_KEY),
        ("XADD", _STREAM_KEY, "NOMKSTREAM", "*", "id", ""),
        ("INCRBY", _ADDED_KEY, "0"),
        ("GET", _MARK_KEY),
        ("MGET", _MARK_KEY, _ADDED_KEY, _REMOVED_KEY),
    ),
    forbidden=(
        *_NOBODY,
        ("CONFIG", "GET", "appendfsync"),
        ("SET", _MARK_KEY, "", "XX"),
        ("INCRBY", _REMOVED_KEY, "0"),
        ("XRANGE", _STREAM_KEY, "-", "+", "COUNT", "1"),
        ("XDEL", _STREAM_KEY, "0-1"),
    ),
)
CONTROLLER = QueueRole(
    user="controller",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} +config|get +acl|dryrun "
        f"(+xgroup|create +xreadgroup +xrange +xack +xdel {_STREAM}) "
        f"(+set ~slipstream:*:mark) (+incrby ~slipstream:*:mark:*:removed) (+get +mget {_MARKS})"
    ),
    needed=(
        ("CONFIG", "GET", "appendfsync"),
        ("ACL", "DRYRUN", "default", "PING"),
        ("SET", _MARK_KEY, "", "XX"),
        ("GET", _MARK_KEY),
        ("MGET", _MARK_KEY, _ADDED_KEY, _REMOVED_KEY),
        ("INCRBY", _REMOVED_KEY, "0"),
        ("XGROUP", "CREATE", _STREAM_KEY, "controller", "0"),
        ("XREADGROUP", "GROUP", "controller", "controller", "STREAMS", _STREAM_KEY, "0"),
        ("XRANGE", _STREAM_KEY, "-", "+", "COUNT", "1"),
        ("XACK", _STREAM_KEY, "controller", "0-1"),
        ("XDEL", _STREAM_KEY, "0-1"),
    ),
    forbidden=(
        *_NOBODY,
        ("XADD", _STREAM_KEY, "NOMKSTREAM", "*", "id", ""),
        ("INCRBY", _ADDED_KEY, "0"),
    ),
)
# No client logs in as this user. But many servers load transactions from their files with its
# rights, and silently drop the transactions that it may not write.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
ROLES: Mapping[QueueEnd, QueueRole] = {"controller": CONTROLLER, "rollout_server": ROLLOUT_SERVER}


def right_of(command: Command) -> str:
    """Returns a command for people: its name, and the key if it has one."""
    words = [command[0].lower()]
    if command[0] in ("CONFIG", "ACL", "XGROUP"):
        words[0] += f"|{command[1].lower()}"
    key = next((word for word in command[1:] if word.startswith(("slipstream:", "somebody"))), "")
    return " ".join([*words, *([key.replace(":examination:", ":RUN:")] if key else [])])
