"""Opens the parts of a server that the settings ask for; the modules of others stay unimported."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import grpc.aio
from slipstream.core.errors import ConfigError
from slipstream.core.extension import active, queues, resolve
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.protocol.queue.base import TrajectorySender
from slipstream.rollout_server.engine_interface import Engine
from slipstream.rollout_server.part import ServerPart


def engine_of_option(config: Config) -> Callable[[Config], Awaitable[Engine]] | None:
    """Returns what starts the engine of an option; None if the server has vLLM itself.

    Raises ConfigError if two options have one.
    """
    manifests = [manifest for manifest in active(config) if manifest.engine]
    if len(manifests) > 1:
        names = ", ".join(manifest.name for manifest in manifests)
        raise ConfigError(f"a rollout server has one engine, and {names} each start one")
    return resolve(manifests[0].engine) if manifests else None


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
