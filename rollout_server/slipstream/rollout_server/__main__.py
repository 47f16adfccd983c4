"""Runs one rollout server: `python -m slipstream.rollout_server`.

The exit code is 0 after a normal stop, 1 after a failure (stderr has the cause), 2 after a
ConfigError (wrong settings, or the controller refuses the server), 4 if vLLM's engine did not
start, and 5 when the run was stopped or has failed and may go on.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from slipstream.core.configuration.config_file import check_model, load_config
from slipstream.core.errors import (
    DONE,
    FAILED,
    NOT_STARTED,
    RUN_STOPPED,
    USAGE_ERROR,
    ConfigError,
    SlipstreamError,
)
from slipstream.core.extension import check_process
from slipstream.core.logs import use_format
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.description import free_memory
from slipstream.core.machine.gpus import fill_gpus, gpu_names
from slipstream.core.machine.process import become_reaper, die_with_parent, kernel_oom_kills, leave
from slipstream.core.run_folder import LOCKS, LOGS
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.protocol.access.exposure import narrow_sockets
from slipstream.protocol.weights.nccl_group import set_nccl_environment
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.engine_interface import Engine, EngineDied
from slipstream.rollout_server.episodes.worker_gateway import WorkerLimits

# Bytes of output that are kept for each environment worker; older lines are removed.
WORKER_LOG_BYTES = 16 << 20


def main(arguments: list[str] | None = None) -> int:
    """Runs one rollout server until a signal or the controller stops it; returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    die_with_parent()
    become_reaper()
    try:
        config = load_config(options.config, options.overrides)
        use_format(config, options.server_id)
        check_model(config)
        return uvloop.run(_serve(config, options))
    except (BaseExceptionGroup, SlipstreamError) as error:
        return report(error)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.rollout_server",
        description="One rollout server: a vLLM engine and the episodes that it generates for.",
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved settings of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--server-id", required=True, help="name of this server; unique in its run")
    return parser.parse_args(arguments)


async def _serve(config: Config, options: argparse.Namespace) -> int:
    from slipstream.core.configuration.reply_ends import find_reply_ends
    from slipstream.core.models.images import image_tokens
    from slipstream.rollout_server.episodes.play import ServedModel
    from slipstream.rollout_server.episodes.renderer import Renderer
    from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
    from slipstream.rollout_server.parts import engine_of_option
    from slipstream.rollout_server.service import RolloutServer

    check_process(config)
    start_elsewhere = engine_of_option(config)
    if start_elsewhere is None:
        child_processes.import_engine(config)
    from slipstream.rollout_server.vllm.agent_services import AgentServices

    set_nccl_environment(os.environ)
    controller, _ = address_parts(options.controller)
    # An engine and its workers run on one host.
    narrow_sockets(os.environ, gloo="127.0.0.1", nccl=controller)
    child_processes.bind_children()
    settings = config.rollout_server
    renderer = Renderer(
        config.model.path,
        template=settings.chat_template,
        values=settings.chat_template_kwargs,
        images=image_tokens(config.model.path),
        ends=find_reply_ends(config),
    )
    # An engine elsewhere computes on no GPU of this server.
    num_gpus = settings.num_workers if start_elsewhere is None else 0
    gpus = gpu_names(os.environ, 0, num_gpus)
    limit_s = config.learner.timeout_s
    # Both may block the event loop: nothing else runs in it yet.
    with (
        fill_gpus(config.run_dir / LOCKS, gpus, alone=True, limit_s=limit_s),
        child_processes.limited_start(settings.start_timeout_s),
    ):
        try:
            engine, llm = await _started(config, start_elsewhere)
        except SlipstreamError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM's own, told here
            traceback.print_exception(error)
            return NOT_STARTED
    oom_kills = kernel_oom_kills()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        server_id = ServerId(options.server_id)
        gib = settings.environment_memory_gib
        memory_bytes = free_memory()[1] // 2 if gib is None else int(gib * (1 << 30))
        gateway = WorkerGateway(
            config.run_dir / LOGS,
            server=server_id,
            log_bytes=WORKER_LOG_BYTES,
            limits=WorkerLimits(
                memory_bytes,
                settings.environment_processes,
                start_s=config.controller.stall_timeout_s,
                lone_workers=len(os.sched_getaffinity(0)),
            ),
            takes_tools=settings.tool_parser is not None,
        )
        model = ServedModel(engine, renderer, AgentServices(llm, renderer, settings))
        server = RolloutServer(config, options.controller, server_id, model, gateway)
        run_stopped = await server.run(stop)
    except* EngineDied as died:
        # Every open request has failed with the same error.
        message = str(_leaves(died)[0])
        raise EngineDied(
            child_processes.describe_engine_death(message, oom_kills=oom_kills)
        ) from None
    finally:
        await engine.aclose()
    return RUN_STOPPED if run_stopped else DONE


async def _started(
    config: Config, start_elsewhere: Callable[[Config], Awaitable[Engine]] | None
) -> tuple[Engine, Any]:
    """Returns the started engine, and vLLM's `AsyncLLM`, or None without one here."""
    if start_elsewhere is not None:
        return await start_elsewhere(config), None
    from slipstream.rollout_server.vllm.engine import VllmEngine

    engine = await VllmEngine.start(config, seed=secrets.randbits(31))
    return engine, engine.llm


def report(error: BaseException) -> int:
    """Prints each cause of an error, a SlipstreamError as one line; returns the exit code."""
    causes = _leaves(error)
    for cause in causes:
        if isinstance(cause, SlipstreamError):
            print(f"slipstream: {cause}", file=sys.stderr)
        else:
            traceback.print_exception(cause)
    return USAGE_ERROR if all(isinstance(cause, ConfigError) for cause in causes) else FAILED


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


if __name__ == "__main__":
    leave(main())
