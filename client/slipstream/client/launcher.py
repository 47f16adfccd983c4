"""Starts the parts of a run as processes, watches them, and says what happens.

Consumes: events of the controller, ends of processes. Produces: progress on the screen, restarts of rollout servers.
Waits for: the controller to end. Unblocked by: the end of the run, or of a process that the run cannot do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from slipstream.client.children import Child, start_child
from slipstream.client.display import Display
from slipstream.client.preflight import (
    check_environments,
    check_installed,
    check_new_run,
    check_port,
    check_settings,
    free_port,
)
from slipstream.protocol.config import Config, address_parts
from slipstream.protocol.config_file import dump_config, load_config, parse_config
from slipstream.protocol.errors import ConfigError, RunFailed
from slipstream.protocol.security import Credentials, call_metadata, open_channel
from slipstream.v1 import status_pb2, status_pb2_grpc, trainer_pb2, trainer_pb2_grpc

CONTROLLER = "slipstream.learner.controller"
TRAINER = "slipstream.learner.trainer"
ROLLOUT_SERVER = "slipstream.rollout_server"
GRACE_S = 30.0
CONNECT_LIMIT_S = 30.0
# The trainer may need so long to leave after the controller is gone.
LEAVE_LIMIT_S = 60.0


async def run_all(path: Path, overrides: Sequence[str], *, dry_run: bool) -> int:
    """`slipstream run`: controller, trainer ranks and rollout servers on this machine."""
    config = load_config(path, overrides)
    credentials = check_settings(config)
    check_installed("torch", "megatron.core", "vllm")
    check_new_run(config)
    check_port(config.controller.address)
    if dry_run:
        print(dump_config(config), end="")
        return 0
    logs = config.run_dir / "logs"
    await check_environments(config, logs / "preflight.log")
    async with AsyncExitStack() as stack:
        config = await _with_queue(stack, config)
        session = await stack.enter_async_context(Session(config, credentials))
        session.start_controller()
        await session.start_trainers(first_rank=0, num_ranks=config.learner.world_size)
        for index in range(config.rollout_server.count):
            session.keep_rollout_server(f"server-{index}")
        return await session.wait()


async def run_learner(
    path: Path, overrides: Sequence[str], *, node_rank: int, master: str | None, dry_run: bool
) -> int:
    """`slipstream learner`: the trainer ranks of this node, and on node 0 the controller."""
    if master is not None:
        overrides = [*overrides, f'learner.master="{master}"']
    config = load_config(path, overrides)
    credentials = check_settings(config)
    check_installed("torch", "megatron.core")
    per_node = config.learner.ranks_per_node or config.learner.world_size
    num_nodes = config.learner.world_size // per_node
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"--node-rank must be 0 to {num_nodes - 1}, got {node_rank}")
    if num_nodes > 1 and address_parts(config.learner.master)[1] == 0:
        raise ConfigError("learner.master needs a port that all nodes know, got 0")
    if config.queue.kind == "redis" and config.queue.redis_url is None:
        raise ConfigError("queue.redis_url is required when the services are started separately")
    if node_rank == 0:
        check_new_run(config)
        check_port(config.controller.address)
    if dry_run:
        print(dump_config(config), end="")
        return 0
    if node_rank == 0:
        await check_environments(config, config.run_dir / "logs" / "preflight.log")
    async with Session(config, credentials, node_rank=node_rank) as session:
        if node_rank == 0:
            session.start_controller()
        await session.start_trainers(first_rank=node_rank * per_node, num_ranks=per_node)
        return await session.wait()


async def run_rollout_server(
    path: Path,
    overrides: Sequence[str],
    *,
    controller: str | None,
    server_id: str | None,
    dry_run: bool,
) -> int:
    """`slipstream rollout-server`: one server, which joins the controller by itself."""
    if controller is not None:
        overrides = [*overrides, f'controller.address="{controller}"']
    config = load_config(path, overrides)
    check_settings(config)
    check_installed("vllm")
    if config.queue.kind == "redis" and config.queue.redis_url is None:
        raise ConfigError("queue.redis_url is required when the services are started separately")
    if dry_run:
        print(dump_config(config), end="")
        return 0
    name = server_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
    folder = config.run_dir / "servers" / name
    resolved = _write_config(config, folder)
    arguments = ["--config", str(resolved), "--controller", config.controller.address]
    child = await start_child(
        name, ROLLOUT_SERVER, [*arguments, "--server-id", name], log_path=folder / "server.log"
    )
    print(f"rollout server {name} joins {config.controller.address}; its log is {child.log_path}")
    stop = asyncio.ensure_future(_stop_signal())
    ended = asyncio.ensure_future(child.process.wait())
    await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    await child.stop(GRACE_S)
    if child.process.returncode == 0:
        print(f"rollout server {name} has left")
        return 0
    error = ConfigError if child.process.returncode == 2 else RunFailed
    raise error(child.describe_end())


class Session:
    """The processes of one command, from the first to the last; an async context manager."""

    def __init__(self, config: Config, credentials: Credentials, *, node_rank: int = 0) -> None:
        self._config = config
        self._credentials = credentials
        self._node_rank = node_rank
        self._logs = config.run_dir / "logs"
        self._resolved = _write_config(
            config, config.run_dir / f"node-{node_rank}" if node_rank else config.run_dir
        )
        self._children: list[Child] = []
        self._controller: asyncio.Task[Child] | None = None
        self._trainers: list[Child] = []
        self._servers: dict[str, asyncio.Task[None]] = {}
        self._display = Display(config)
        self._over = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        for task in self._servers.values():
            task.cancel()
        await asyncio.gather(*self._servers.values(), return_exceptions=True)
        await asyncio.gather(*(child.stop(GRACE_S) for child in self._children))

    def start_controller(self) -> None:
        """Starts the controller."""
        self._controller = asyncio.ensure_future(self._start("controller", CONTROLLER, []))

    async def start_trainers(self, *, first_rank: int, num_ranks: int) -> None:
        """Starts the trainer ranks of this node as torchrun would."""
        learner = self._config.learner
        host, port = address_parts(learner.master)
        environ = {
            "WORLD_SIZE": str(learner.world_size),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port or free_port(host)),
        }
        if learner.threads:
            environ["OMP_NUM_THREADS"] = str(learner.threads)
        for local_rank in range(num_ranks):
            rank = first_rank + local_rank
            ranked = {**environ, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            child = await self._start(f"trainer-rank-{rank}", TRAINER, [], environ=ranked)
            self._trainers.append(child)

    def keep_rollout_server(self, name: str) -> None:
        """Starts a rollout server and starts it again when it dies."""
        self._servers[name] = asyncio.ensure_future(self._keep(name))

    async def wait(self) -> int:
        """Shows progress until the run is over; 0, or RunFailed with the cause."""
        if self._controller is None:
            return await self._wait_for_trainers()
        controller = await self._controller
        watchers = [
            asyncio.ensure_future(self._watch_trainers()),
            asyncio.ensure_future(self._forward_stop()),
        ]
        show = asyncio.ensure_future(self._show_events())
        try:
            await controller.process.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await show
            await self._let_leave()
        finally:
            for task in (*watchers, show):
                task.cancel()
            await asyncio.gather(*watchers, show, return_exceptions=True)
        if controller.process.returncode == 0:
            self._display.summary()
            return 0
        if self._display.failure:
            self._display.summary()
            raise RunFailed(self._display.failure)
        raise RunFailed(controller.describe_end())

    async def _let_leave(self) -> None:
        others = [
            child for child in self._children if child.name != "controller" and child.is_running
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_LIMIT_S):
                await asyncio.gather(*(child.process.wait() for child in others))

    async def _start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        environ: dict[str, str] | None = None,
    ) -> Child:
        child = await start_child(
            name,
            module,
            ["--config", str(self._resolved), *arguments],
            log_path=self._logs / f"{name}.log",
            environ=environ or {},
        )
        self._children.append(child)
        return child

    async def _keep(self, name: str) -> None:
        settings = self._config.rollout_server
        restarts = 0
        address = self._config.controller.address
        while True:
            arguments = ["--controller", address, "--server-id", name]
            child = await self._start(name, ROLLOUT_SERVER, arguments)
            await child.process.wait()
            # What the server started must not go on without it.
            child.signal(signal.SIGKILL)
            if self._over or child.process.returncode == 0:
                return
            self._display.warn(child.describe_end())
            restarts += 1
            if child.process.returncode == 2 or restarts > settings.max_restarts:
                await self._report_failure(f"rollout server {name} cannot run", rank=0)
                return
            await asyncio.sleep(min(2.0**restarts / 2, 30.0))

    async def _watch_trainers(self) -> None:
        waits = {asyncio.ensure_future(child.process.wait()): child for child in self._trainers}
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                child = waits.pop(wait)
                if child.process.returncode != 0:
                    rank = int(child.name.rpartition("-")[2])
                    await self._report_failure(child.describe_end(), rank=rank)
                    return

    async def _wait_for_trainers(self) -> int:
        stop = asyncio.ensure_future(_stop_signal())
        ends = [asyncio.ensure_future(child.process.wait()) for child in self._trainers]
        await asyncio.wait([stop, asyncio.gather(*ends)], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for child in self._trainers:
            await child.stop(GRACE_S)
        failed = [child for child in self._trainers if child.process.returncode]
        if failed:
            raise RunFailed(failed[0].describe_end())
        return 0

    async def _forward_stop(self) -> None:
        number = await _stop_signal()
        self._display.warn(f"{number.name}: the run is stopped in order; once more ends it at once")
        async with self._channel() as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            request = status_pb2.StopRunRequest(reason=f"the user sent {number.name}")
            await stub.StopRun(request, metadata=call_metadata(self._credentials), timeout=10.0)

    async def _report_failure(self, message: str, *, rank: int) -> None:
        import grpc.aio

        failure = trainer_pb2.TrainerFailure(message=message, rank=rank)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self._channel() as channel:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                metadata = call_metadata(self._credentials)
                await stub.ReportFailure(failure, metadata=metadata, timeout=10.0)

    async def _show_events(self) -> None:
        import grpc.aio

        async with self._channel() as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            metadata = call_metadata(self._credentials)
            while not self._display.is_over:
                request = status_pb2.WatchRequest(after=self._display.last_event)
                try:
                    async for event in stub.Watch(request, metadata=metadata, wait_for_ready=True):
                        self._display.show(event)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.5)

    def _channel(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return open_channel(self._config.controller.address, self._credentials)


async def _stop_signal() -> signal.Signals:
    """Waits for the first SIGINT or SIGTERM; the next one has its usual effect."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
        if not came.done():
            came.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    return await came


async def _with_queue(stack: AsyncExitStack, config: Config) -> Config:
    """Starts the embedded server when the queue is Redis and no address is given."""
    if config.queue.kind != "redis" or config.queue.redis_url is not None:
        return config
    from slipstream.protocol.queue.redis import EmbeddedServer

    server = await stack.enter_async_context(EmbeddedServer(config.run_dir / "redis"))
    table = config.model_dump(mode="json", exclude_none=True)
    table["queue"]["redis_url"] = server.url
    return parse_config(table, source="queue")


def _write_config(config: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    # It may hold the password of the queue.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(dump_config(config))
    return path
