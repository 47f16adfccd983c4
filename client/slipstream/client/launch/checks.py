"""Lists all checks before a run starts, for commands, their dry runs and `slipstream doctor`.

The checks of an extension stand behind the one that they name, where the settings ask for it.

A command stops at the first problem of what it starts. A dry run makes no checks of `Stage.START`.
The doctor shows the findings of all checks: of one role, of a run that starts nothing else here, or
without settings of the machine alone.

Waits for: a controller and a queue that others start. Unblocked by: their answers, or the scene's
time limit.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator

import grpc
import grpc.aio
import psutil
from slipstream.client.launch import fit, machine, preflight
from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.preflight import hold_address, told_when_slow
from slipstream.client.launch.sandboxes import check_sandbox
from slipstream.client.launch.scene import (
    ANY,
    CONTROLLER,
    LEARNER,
    SERVER,
    WHOLE_RUN,
    Finding,
    Scene,
    Verdict,
    advice,
    ok,
    problem,
)
from slipstream.client.run_folder import check_run_folder
from slipstream.core.configuration.config_file import check_model, check_sizes, model_warnings
from slipstream.core.errors import ConfigError
from slipstream.core.extension import active, resolve
from slipstream.core.machine.address import address_parts, listen
from slipstream.core.models.model_rules import vocabulary_problems
from slipstream.core.run_folder import TOKEN
from slipstream.core.settings.measurement_sections import check_trackers
from slipstream.protocol.access.exposure import (
    describe_exposure,
    interface_to,
    local_address,
)
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import (
    UNTRUSTED,
    Credentials,
    call_metadata,
    cause_of,
    check_address,
    check_metrics_address,
    open_channel,
)
from slipstream.protocol.access.tokens import (
    check_certificates,
    check_own,
    check_own_certificate,
    is_open_to_all,
)
from slipstream.protocol.setup import Answer, differences, holds_mark
from slipstream.v1 import status_pb2, status_pb2_grpc

# Seconds in which the controller must answer the doctor.
DOCTOR_LIMIT_S = 3.0
# Variable -> whether it takes the beginning of a name, as NCCL does.
INTERFACES = {"NCCL_SOCKET_IFNAME": True, "GLOO_SOCKET_IFNAME": False}
FILES = "deploy/make_certificates.sh makes all files"

RETRY_S = 0.2
# Status codes after which the controller may still come.
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Seconds in which a file of another host must appear: network file systems cache for a while that
# there was none.
SHOW_LIMIT_S = 5.0


def all_checks(scene: Scene) -> list[Check]:
    """Returns the checks of the kernel, and of the extensions that the settings ask for."""
    checks = list(CHECKS)
    for extension in active(scene.config) if scene.stated is not None else ():
        added: Iterable[Check] = resolve(extension.checks) if extension.checks else ()
        for check in added:
            areas = [other.area for other in checks]
            if check.after in areas:
                checks.insert(areas.index(check.after) + 1, check)
            else:
                checks.append(check)
    return checks


async def require(scene: Scene, *stages: Stage, facts: list[str] | None = None) -> list[str]:
    """Makes the checks of `stages` that the scene's parts need; raises ConfigError for a problem.

    Quick checks of the settings and the machine come first: a full disk is no news after a minute.
    Then come those that start a program, and last the places that another run may have now. A dry
    run goes on where this machine lacks something; it is returned. `facts` gets what commands say
    of a run that may start.
    """
    lacking = []
    checks = [check for check in all_checks(scene) if check.stage in stages]
    checks.sort(key=_order)
    for check in checks:
        if not check.needs & scene.parts:
            continue
        for finding in await check.found(scene):
            if check.is_told and facts is not None:
                facts.append(finding.seen)
            if finding.verdict is Verdict.PROBLEM:
                lacking.append(f"{finding.area}: {finding.seen}: {finding.remedy}")
                if not (scene.dry_run and check.of_machine):
                    raise ConfigError(lacking[-1])
    return lacking


def _order(check: Check) -> int:
    if check.starts_program:
        return 1
    return 0 if check.stage is Stage.SETTINGS or check.of_machine else 2


async def find_all(scene: Scene) -> list[Finding]:
    """Returns what the doctor shows: without settings, the findings about the machine."""
    findings = []
    for check in all_checks(scene):
        if check.needs & scene.parts and (check.of_machine or scene.stated is not None):
            try:
                findings += await check.found(scene)
            except ConfigError as error:
                findings.append(problem(str(error), check.remedy, area=check.area))
    return findings


def check_files(scene: Scene) -> list[Finding]:
    """Checks the model's files, or their sizes alone for a dry run."""
    config = scene.config
    (check_sizes if scene.dry_run else check_model)(config)
    for surplus in vocabulary_problems(config.model.path):
        raise ConfigError(surplus)
    for extension in active(config):
        if extension.files_check:
            resolve(extension.files_check)(config)
    parallel = config.learner.parallel
    layout = {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
    }
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items())
    fits = f"{config.model.path} fits world size {config.learner.world_size}, {sizes}"
    remedy = "nothing, if they are names and notes"
    return [ok(fits), *(advice(warning, remedy) for warning in model_warnings(config))]


def check_security(scene: Scene) -> Iterator[Finding]:
    """Checks TLS, tokens and what they must protect."""
    config = scene.config
    security = scene.config.security
    credentials = Credentials.load(security)
    check_certificates(security)
    check_address(config.controller.address, credentials, what="controller.address")
    if config.tracking.prometheus is not None and "controller" in scene.parts:
        check_metrics_address(config.tracking.prometheus, credentials)
    means = {"TLS": credentials.has_tls, "token": bool(credentials.token)}
    protections = [name for name, is_used in means.items() if is_used]
    yield ok(" and ".join(protections) or "loopback only, with a token in the run's folder")
    for path in (security.token_file, security.metrics_token_file, security.tls_key):
        if is_open_to_all(path):
            yield advice(f"every account of this machine may read {path}", f"chmod 600 {path}")
    if "controller" in scene.parts and credentials.token is not None:
        check_own((credentials.token, *credentials.further_tokens))


def check_exposure(scene: Scene) -> Finding:
    """Checks that torch's sockets have no public address."""
    exposed = describe_exposure(scene.config)
    if not exposed:
        return ok("none that other machines could reach without TLS and token")
    seen = f"{exposed}: torch's rendezvous, gloo and NCCL know neither TLS nor token"
    remedy = "let nobody but the hosts of the run reach these addresses; docs/security.md says why"
    return advice(seen, remedy)


def check_queue_settings(scene: Scene) -> str | None:
    """Tells where trajectories wait, unless an extension's queue does."""
    if scene.config.queue.kind != "grpc":
        return None
    return "gRPC: trajectories wait in the memory of the rollout servers"


def check_folder(scene: Scene) -> str:
    """Checks that a run can start or go on in its folder."""
    holds_run = check_run_folder(scene.config)
    return f"{scene.config.run_dir} {'holds a run to go on with' if holds_run else 'is free'}"


def check_controller(scene: Scene) -> str | None:
    """Checks that the controller can listen here, and that parts of elsewhere know its port."""
    address = scene.config.controller.address
    parts = scene.parts
    if not (scene.dry_run or address_parts(address)[1] or parts >= WHOLE_RUN):
        raise ConfigError(
            "controller.address must name a port where the parts of a run are started separately, "
            f"such as 127.0.0.1:7070, got {address}"
        )
    if "controller" not in parts:
        return None
    with hold_address(address):
        return f"{address} is of this machine and free"


def check_master(scene: Scene) -> str | None:
    """Checks that the trainer ranks can meet here, where rank 0 starts."""
    address = scene.config.learner.master
    host, port = address_parts(address)
    try:
        listen(host).close()
    except OSError:
        if not scene.dry_run:
            raise ConfigError(
                "learner.master must be an address of this machine, where trainer rank 0 starts, "
                f"got {address}"
            ) from None
        return f"{address} is of another machine, learner node 0"
    if not port:
        return None
    try:
        with hold_address(address):
            return f"{address} is of this machine and free"
    except ConfigError as error:
        raise ConfigError(
            f"learner.master: {address} is in use; choose another port, the same on all nodes"
        ) from error


def check_interfaces(scene: Scene) -> str | None:
    """Checks the interfaces that variables name, and the route of several nodes to rank 0."""
    learner = scene.config.learner
    present = psutil.net_if_addrs()
    for variable, takes_beginning in INTERFACES.items():
        value = os.environ.get(variable, "")
        # "^" selects all other interfaces, "=" whole names.
        excludes = value.startswith("^")
        names = value.removeprefix("^")
        is_whole = names.startswith("=") or not takes_beginning
        names = names.removeprefix("=")
        # NCCL allows a port after a name.
        patterns = [part.partition(":")[0] for part in names.split(",") if part]
        selected = [
            any(name == pattern if is_whole else name.startswith(pattern) for pattern in patterns)
            for name in present
        ]
        if value and all(is_selected is excludes for is_selected in selected):
            raise ConfigError(
                f"{variable}={value} names no interface of this host, which has "
                f"{', '.join(present)}: unset it, or name one of these"
            )
    if learner.ranks_per_node in (None, learner.world_size) or scene.parts == SERVER:
        return None
    try:
        ours = local_address(learner.host)
    except OSError as error:
        raise ConfigError(
            f"learner.master {learner.master} cannot be reached from this host: {error.strerror}"
        ) from error
    way = interface_to(learner.host) or ours
    return f"{way} leads to learner.master {learner.master}"


async def check_setup(scene: Scene) -> str | None:
    """Waits for a controller and compares its setup; ranks that save must share its folder."""
    if "controller" in scene.parts:
        return None
    config = scene.config
    limit_s = scene.connect_timeout_s
    of_ranks = "learner" in scene.parts
    address = config.controller.address
    with told_when_slow(f"waiting for the controller at {address}, for up to {limit_s:g} s"):
        answer = await ask_controller(scene)
    for difference in differences(answer, config, of_ranks=of_ranks):
        raise ConfigError(difference)
    deadline_s = time.monotonic() + SHOW_LIMIT_S
    shares = of_ranks and config.checkpoint.every_steps
    while shares and not holds_mark(config, answer.setup):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"run.dir must be a folder that all nodes of the learner share, but here "
                f"{config.run.dir / answer.setup.mark} is not that of run {answer.setup.run_id}: "
                "mount it, or save no checkpoints (checkpoint.every_steps = 0)"
            )
        await asyncio.sleep(RETRY_S)
    # The largest difference that the times of the call allow.
    times_s = (answer.asked_s, answer.answered_s)
    apart_s = max(abs(time_s - answer.setup.unix_time_s) for time_s in times_s)
    same = "same versions and settings"
    return f"{address} answers: {same}, clocks differ by {apart_s:.2f} s at most"


async def running_id(scene: Scene) -> str:
    """Returns the run's id from its controller; raises ConfigError as `ask_controller` does."""
    return (await ask_controller(scene, scene.config.run.id)).setup.run_id


async def ask_controller(scene: Scene, run_id: str | None = None) -> Answer:
    """Asks the controller for its setup; raises ConfigError if it refuses or is late."""
    address = scene.config.controller.address
    limit_s = scene.connect_timeout_s
    cause = ""
    credentials = run_credentials(scene.config)
    async with open_channel(address, credentials) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            asked_s = time.time()
            try:
                setup = await stub.GetSetup(
                    status_pb2.GetSetupRequest(),
                    timeout=left_s,
                    metadata=call_metadata(credentials, run_id),
                )
            except grpc.aio.AioRpcError as error:
                cause = cause_of(error.code(), error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    cause = "what answers is no controller of this version"
                # A run that began meanwhile has made its token.
                newest = run_credentials(scene.config)
                if newest.token != credentials.token:
                    credentials = newest
                    continue
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and credentials.token is None:
                    cause = f"it asks for its run's token, and {scene.config.run_dir / TOKEN} is "
                    cause += "not there: set security.token_file to that file of the run"
                if error.code() not in AWAY or cause.startswith(UNTRUSTED):
                    raise ConfigError(f"the controller at {address}: {cause}") from None
            else:
                return Answer(setup, asked_s, time.time())
            await asyncio.sleep(min(RETRY_S, left_s))
    raise ConfigError(
        f"no controller answers at {address} within {limit_s:g} s: {cause}; start the learner, and "
        "let no firewall stand between"
    )


CHECKS = (
    Check("python", Stage.DOCTOR, ANY, machine.check_python, of_machine=True),
    Check("processors", Stage.DOCTOR, ANY, machine.check_processors, of_machine=True),
    Check("memory", Stage.DOCTOR, ANY, machine.check_memory, of_machine=True),
    Check("stack", Stage.DOCTOR, ANY, machine.check_stack, of_machine=True),
    Check("driver", Stage.DOCTOR, ANY, machine.check_gpus, of_machine=True),
    Check("gpu", Stage.DOCTOR, ANY, machine.check_build, of_machine=True),
    Check("sandbox", Stage.DOCTOR, SERVER, check_sandbox, of_machine=True),
    Check("address space", Stage.SETTINGS, ANY, machine.check_address_space, of_machine=True),
    Check("model", Stage.SETTINGS, ANY, check_files),
    Check("security", Stage.SETTINGS, WHOLE_RUN, check_security, FILES),
    Check("open sockets", Stage.SETTINGS, ANY, check_exposure, "use a private network or a tunnel"),
    Check("queue", Stage.SETTINGS, WHOLE_RUN, check_queue_settings),
    Check("packages", Stage.SETTINGS, ANY, machine.check_packages, of_machine=True),
    Check("tracking", Stage.SETTINGS, CONTROLLER, lambda s: check_trackers(s.config.tracking)),
    Check("engine", Stage.SETTINGS, SERVER, fit.check_engine),
    Check("for vLLM", Stage.SETTINGS, WHOLE_RUN, preflight.check_vllm, starts_program=True),
    Check(
        "algorithm",
        Stage.SETTINGS,
        ANY - SERVER - {"export"},
        preflight.check_functions,
        starts_program=True,
    ),
    Check("for Megatron", Stage.SETTINGS, LEARNER, preflight.check_megatron, starts_program=True),
    Check(
        "ends of replies",
        Stage.SETTINGS,
        CONTROLLER | {"export"},
        preflight.check_reply_ends,
        is_told=True,
        starts_program=True,
    ),
    Check(
        "imports",
        Stage.PLACE,
        SERVER,
        machine.check_companions,
        of_machine=True,
        starts_program=True,
    ),
    Check(
        "environment", Stage.PLACE, CONTROLLER | SERVER, preflight.check_modules, of_machine=True
    ),
    Check("network", Stage.PLACE, LEARNER | SERVER, check_interfaces),
    Check("shared memory", Stage.PLACE, WHOLE_RUN, machine.check_shared_memory, of_machine=True),
    Check("open files", Stage.PLACE, WHOLE_RUN, machine.check_open_files, of_machine=True),
    Check("batches", Stage.PLACE, LEARNER, fit.check_batches, of_machine=True),
    Check("disk", Stage.PLACE, CONTROLLER, fit.check_disk, of_machine=True),
    Check("run folder", Stage.PLACE, CONTROLLER, check_folder),
    Check("controller", Stage.PLACE, WHOLE_RUN, check_controller),
    Check("certificate", Stage.PLACE, CONTROLLER, lambda s: check_own_certificate(s.config), FILES),
    Check("learner.master", Stage.PLACE, CONTROLLER, check_master),
    Check("setup", Stage.START, SERVER | LEARNER, check_setup),
    Check("environments", Stage.START, CONTROLLER | SERVER, preflight.check_environments),
    Check("placement", Stage.DOCTOR, ANY, fit.check_fit),
)
