"""The settings of the queue of trajectories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from slipstream.core.settings.section import Positive, Section

QueueEnd: TypeAlias = Literal["controller", "rollout_server"]


class QueueUserSection(Section):
    """The user as which one end of the queue logs in to Redis, not the one in `redis_url`."""

    # Name of the user; docs/security.md has the rights that it needs.
    user: Annotated[str, Field(min_length=1)]
    # File with the user's password.
    password_file: Path


# Form of a URL. A password with one of /?# in it would be cut in two, and shown as host or path.
_REDIS_URL = re.compile(
    r"rediss?://([^/?#]*@)?(\[[\da-fA-F:.]+\]|[^/?#@:\[\]]+)(:\d{1,5})?(/\d*)?(\?[^#@]*)?"
    r"|unix://([^/?#]*@)?/[^?#]*(\?[^#]*)?"
)


class QueueSection(Section):
    """The queue in which finished trajectories wait for the journal."""

    # grpc: in the memory of the rollout servers; redis: on the disk of a Redis or Valkey server.
    kind: Literal["grpc", "redis"] = "grpc"
    # redis://, rediss:// or unix:// ; without it `slipstream run` starts a server.
    redis_url: str | None = None
    # File with the password, which is then left out of `redis_url`.
    redis_password_file: Path | None = None
    # A table of its own, below: the controller's user.
    controller: QueueUserSection | None = None
    # A table of its own, below: the rollout servers' user.
    rollout_server: QueueUserSection | None = None
    # Bytes that may wait in the queue: of each server (grpc), of all servers together (redis). When
    # it is full, servers wait. Leases of all servers together reserve no more than this.
    max_bytes: Positive = 256 << 20

    def user_of(self, end: QueueEnd) -> QueueUserSection | None:
        """Returns the table of one end."""
        return self.controller if end == "controller" else self.rollout_server

    @model_validator(mode="after")
    def _url(self) -> QueueSection:
        if self.redis_url is not None and not _REDIS_URL.fullmatch(self.redis_url):
            # The URL is not shown: it may hold a password.
            raise ValueError(
                "redis_url must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH, "
                "with USER:PASSWORD@ before the host if need be: a password with one of /?# in it "
                "is percent-encoded there, or stands in redis_password_file"
            )
        return self

    @model_validator(mode="after")
    def _users(self) -> QueueSection:
        tables = [end for end in ("controller", "rollout_server") if self.user_of(end) is not None]
        if not tables:
            return self
        if self.redis_url is None:
            raise ValueError(
                f"the table {tables[0]} needs redis_url: the embedded server makes its users itself"
            )
        if self.redis_password_file is not None or "@" in urlsplit(self.redis_url).netloc:
            raise ValueError(
                f"the table {tables[0]} names a user: leave redis_password_file out, "
                "and the user in redis_url"
            )
        return self
