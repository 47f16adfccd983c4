"""Checks a configuration against this machine: files, addresses, ports, memory."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Sequence

from slipstream.client.doctor.findings import Finding, advice, ok, problem
from slipstream.client.doctor.fit import check_fit
from slipstream.client.launch.engine_checks import (
    check_cache,
    check_processor,
    check_variables,
    describe_engine,
)
from slipstream.client.launch.placement import uses_gpus
from slipstream.client.launch.preflight import (
    check_engine,
    check_own_certificate,
    check_passed_settings,
    check_port,
    passes_to_megatron,
)
from slipstream.core.configuration.config_file import check_model, model_warnings
from slipstream.core.errors import ConfigError
from slipstream.core.machine.gpus import Gpu
from slipstream.core.settings.config import Config, address_parts
from slipstream.protocol.access.exposure import check_private, describe_exposure
from slipstream.protocol.access.security import Credentials, check_address

CONNECT_LIMIT_S = 3.0


def check_setup(config: Config, gpus: Sequence[Gpu] = ()) -> Iterator[Finding]:
    """Yields the findings about what the configuration asks of this machine."""
    yield from _model(config)
    yield _security(config)
    yield _controller(config)
    yield _weights(config)
    if address_parts(config.learner.master)[1]:
        yield _master(config)
    yield _exposure(config)
    yield _engine(config)
    yield from check_fit(config, gpus)


async def check_passed(config: Config) -> list[Finding]:
    """Checks the settings that are passed through to vLLM and Megatron, if these are installed.

    Megatron needs the model to check them; `check_setup` reports a missing model.
    """
    findings = []
    has_model = (config.model.path / "config.json").is_file()
    if config.rollout_server.engine and importlib.util.find_spec("vllm") is not None:
        findings.append(await _of_engine(config))
    passes = has_model and passes_to_megatron(config)
    if passes and importlib.util.find_spec("megatron") is not None:
        try:
            await check_passed_settings(config)
            findings.append(ok("for Megatron", "Megatron takes what is passed through to it"))
        except ConfigError as error:
            findings.append(problem("for Megatron", str(error)))
    return findings


async def _of_engine(config: Config) -> Finding:
    try:
        await check_engine(config)
    except ConfigError as error:
        return problem("for vLLM", str(error))
    names = ", ".join(config.rollout_server.engine)
    return ok("for vLLM", f"vLLM has the arguments that are passed through: {names}")


def _model(config: Config) -> Iterator[Finding]:
    try:
        check_model(config)
    except ConfigError as error:
        yield problem("model", str(error))
        return
    parallel = config.learner.parallel
    sizes = f"tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, ep {parallel.ep}"
    yield ok("model", f"{config.model.path} fits world size {config.learner.world_size}, {sizes}")
    for warning in model_warnings(config):
        yield advice("model", warning, "nothing, if they are names and notes")


def _engine(config: Config) -> Finding:
    """Reports how an engine would start here; on another machine that may differ."""
    try:
        check_variables(config)
        if (config.model.path / "config.json").is_file():
            check_cache(config)
            check_processor(config)
    except ConfigError as error:
        return problem("engine", str(error))
    return ok("engine", describe_engine(config.rollout_server, on_cpu=not uses_gpus()))


def _security(config: Config) -> Finding:
    try:
        credentials = Credentials.load(config.security)
        check_address(config.controller.address, credentials, what="controller.address")
        check_own_certificate(config)
    except ConfigError as error:
        return problem("security", str(error), "deploy/make_certificates.sh makes all files")
    means = [
        name
        for name, there in (("TLS", credentials.has_tls), ("token", credentials.token))
        if there
    ]
    return ok("security", " and ".join(means) or "loopback only, neither TLS nor token needed")


def _controller(config: Config) -> Finding:
    address = config.controller.address
    if address.startswith("unix:"):
        return ok("controller", address)
    host, port = address_parts(address)
    if not _is_ours(host):
        return _reach("controller", host, port)
    try:
        check_port(address)
    except ConfigError as error:
        return problem("controller", str(error))
    return ok("controller", f"{address} is of this machine and free")


def _weights(config: Config) -> Finding:
    host = config.weights.host
    if _is_ours(host):
        return ok("weights", f"weights.host {host} is an address of this machine")
    return advice(
        "weights",
        f"weights.host {host} is no address of this machine",
        "nothing, unless trainer rank 0 runs here",
    )


def _master(config: Config) -> Finding:
    address = config.learner.master
    if not _is_ours(address_parts(address)[0]):
        return ok("learner.master", f"{address} is of another machine, learner node 0")
    try:
        check_port(address)
    except ConfigError:
        return problem(
            "learner.master", f"{address} is in use", "choose another port, the same on all nodes"
        )
    return ok("learner.master", f"{address} is of this machine and free")


def _exposure(config: Config) -> Finding:
    area = "open sockets"
    try:
        check_private(config)
    except ConfigError as error:
        return problem(area, str(error), "use a private network or a tunnel")
    exposed = describe_exposure(config)
    if not exposed:
        return ok(area, "none that other machines could reach without TLS and token")
    return advice(
        area,
        f"{exposed}: torch's rendezvous, gloo and NCCL know neither TLS nor token",
        "let nobody but the hosts of the run reach these addresses; docs/security.md says why",
    )


def _is_ours(host: str) -> bool:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def _reach(area: str, host: str, port: int) -> Finding:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S):
            return ok(area, f"{host}:{port} answers")
    except OSError as error:
        return problem(
            area, f"{host}:{port}: {error}", "start the controller there, or open the port"
        )
