"""Trajectories wait on Redis or Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Queue

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.queue.kind == "redis"


EXTENSION = Extension(
    name="redis",
    is_on=_is_on,
    checks="slipstream.extensions.redis.launch:CHECKS",
    queues={
        "redis": Queue(
            sender="slipstream.extensions.redis.queue:sender",
            receiver="slipstream.extensions.redis.receiver:receiver",
            is_shared=True,
        ),
    },
)
