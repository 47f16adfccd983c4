"""Opens the parts of a server that the settings ask for; the modules of others stay unimported."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import grpc.aio
from slipstream.core.extension import active, queues, resolve
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
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
    queue = queues()[config.queue.kind]
    sender: AbstractAsyncContextManager[TrajectorySender]
    sender = resolve(queue.sender)(config, channel, metadata, run_id)
    return await stack.enter_async_context(sender)


def server_parts(config: Config, server: ServerId) -> list[ServerPart]:
    """Makes the parts of a server; raises ConfigError if the settings of one cannot work."""
    parts: list[ServerPart] = []
    for extension in active(config):
        if extension.server:
            part: ServerPart | None = resolve(extension.server)(config, server)
            if part is not None:
                parts.append(part)
    return parts
