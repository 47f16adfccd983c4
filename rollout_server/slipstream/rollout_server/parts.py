"""Opens the parts of a server that the settings ask for; the modules of others stay unimported."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio
from slipstream.core.configuration.config_file import vocabulary_size
from slipstream.core.run_folder import FETCHED
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.base import TrajectorySender

if TYPE_CHECKING:
    from slipstream.extensions.reference_server.server import ReferenceServer
    from slipstream.extensions.stored_weights.server import FetchOrders
    from slipstream.v1 import fleet_pb2

    # Opens the orders of one session, which reports on publishes, and whose tasks are in the group.
    OpenFetches: TypeAlias = Callable[
        [Callable[[fleet_pb2.PublishReport], None], asyncio.TaskGroup], FetchOrders
    ]


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


def open_reference(stack: AsyncExitStack, config: Config) -> "ReferenceServer | None":
    """Returns the connection to the reference model's server, which `stack` closes.

    Returns None if the settings name no such server. Raises ConfigError if the file of its API
    key cannot be read.
    """
    section = config.reference
    if section is None or section.server is None:
        return None
    from slipstream.extensions.reference_server.server import ReferenceServer

    opened = ReferenceServer(
        section.server,
        top_k=section.top_k,
        vocab_size=vocabulary_size(config.model.path),
        max_tokens=config.sampling.max_episode_tokens,
    )
    stack.push_async_callback(opened.aclose)
    return opened


def open_fetches(config: Config, server: ServerId) -> "OpenFetches | None":
    """Returns what opens the orders to fetch of each session; None if the trainer sends weights.

    Raises ConfigError if the storage cannot be opened.
    """
    if config.weights.storage_url is None:
        return None
    from slipstream.extensions.stored_weights.server import FetchOrders, StoredWeights

    stored = StoredWeights(config.weights, config.run_dir / FETCHED / server)
    return partial(FetchOrders, stored)
