"""Opens the parts of a server that the settings ask for; the modules of others stay unimported."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc.aio
from slipstream.core.extension import active, resolve
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.base import TrajectorySender
from slipstream.rollout_server.part import ServerPart


async def open_sender(
    stack: AsyncExitStack,
    config: Config,
    channel: grpc.aio.Channel,
    metadata: Sequence[tuple[str, str]],
    run_id: str,
) -> TrajectorySender:
    """Returns the sender of trajectories, which `stack` closes."""
    queue = config.queue
    if queue.kind == "redis":
        from slipstream.extensions.redis.queue import RedisSender

        url = redis_url_of(queue, "rollout_server")
        return await stack.enter_async_context(RedisSender(url, run_id, queue.max_bytes))
    from slipstream.protocol.queue.grpc import GrpcSender

    return await stack.enter_async_context(GrpcSender(channel, metadata, queue.max_bytes))


def server_parts(config: Config, server: ServerId) -> list[ServerPart]:
    """Makes the parts of a server; raises ConfigError if the settings of one cannot work."""
    parts: list[ServerPart] = []
    for extension in active(config):
        if extension.server:
            part: ServerPart | None = resolve(extension.server)(config, server)
            if part is not None:
                parts.append(part)
    return parts
