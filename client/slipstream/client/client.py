"""Calls a running controller: submits and serves environments, asks for status, stops the run.

Waits for: answers of the controller, each with a deadline. `serve` and `watch` wait as long as the
run lasts; a lost controller has `reconnect_timeout_s` to come back.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from slipstream.client.environment import AnyEnvironment
from slipstream.client.episode_host import EpisodeHost, answer_commands, open_stream
from slipstream.client.run_folder import FoundRun, find_run
from slipstream.client.status import (
    EnvironmentStatus,
    Event,
    RunStatus,
    environment_from_pb,
    event_from_pb,
    run_from_pb,
)
from slipstream.core.arguments import Count, NotNegative, Patience, checked
from slipstream.core.backoff import Backoff
from slipstream.core.configuration.config_file import parse_section
from slipstream.core.errors import ConfigError, EnvironmentFailed, SlipstreamError
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.sections import SecuritySection
from slipstream.core.template_values import json_object, values_json
from slipstream.core.waits import asking_in_silence
from slipstream.protocol.access.security import (
    UNTRUSTED,
    Credentials,
    call_metadata,
    cause_of,
    is_loopback,
    open_channel,
)
from slipstream.protocol.access.tokens import check_certificates
from slipstream.protocol.rich_errors import broken_stream
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trajectory_pb2,
)

Request = TypeVar("Request")
Response = TypeVar("Response")
# Ends of a stream after which a caller comes again; INTERNAL is that of proxies.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
LOST = (*_AWAY, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)
# Seconds in which a lost controller may come back.
RECONNECT_TIMEOUT_S = 120.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
CALL_TIMEOUT_S = 15.0
# Seconds in which rollout servers load a submitted environment before it is accepted. They also
# reset its first task, for which the environment's own limit is added.
SUBMIT_TIMEOUT_S = 150.0
# No environment has a limit as long as this, beyond which calls of gRPC have no deadline either.
MOST_TIMEOUT_S = 1e9
# Seconds between two attempts to reach a controller that is not there yet.
LOOK_S = 0.5

logger = logging.getLogger(__name__)


class Client:
    """A connection to the controller of one run, open inside an `async with` block.

    All methods raise ConfigError for a call that cannot work (no controller there, a wrong token, a
    refused argument). They raise SlipstreamError when the controller fails. An error's message is
    one line.
    """

    @checked
    def __init__(
        self,
        address: str,
        *,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_certificate: str | Path | None = None,
        tls_key: str | Path | None = None,
        reconnect_timeout_s: Patience = RECONNECT_TIMEOUT_S,
        run_id: str | None = None,
    ) -> None:
        """Takes the controller's `address`, host:port, and its files; other hosts need `tls_ca`.

        `token_file` holds the run's token, by default the file `token` in its folder, which
        `of_run` finds by itself.

        A run with `security.tls_client_ca` needs `tls_certificate` and `tls_key` too. `serve` and
        `watch` wait up to `reconnect_timeout_s` for a controller that they lost. The run is
        `run_id`, by default the one that answers first; other runs refuse the client's calls.
        Raises ConfigError for an invalid address or file, or a missing one.
        """
        address_parts(address)
        if run_id is not None and not (run_id.isascii() and run_id.isprintable()):
            raise ConfigError(f"run_id must be one line of ASCII, got {run_id!r}")
        self._run_id = run_id
        self._address = address
        self._reconnect_timeout_s = reconnect_timeout_s
        files = {"token_file": token_file, "tls_ca": tls_ca}
        files |= {"tls_certificate": tls_certificate, "tls_key": tls_key}
        self._security = parse_section(SecuritySection, files)
        self._credentials = Credentials.load(self._security)
        self._no_answer = f"no controller answers at {address}"
        self._to_do = "; start a run, or give the address of its controller, HOST:PORT"
        for name, path in (("tls_ca", tls_ca), ("token_file", token_file)):
            if path is None and not is_loopback(address):
                option = name.replace("_", "-")
                raise ConfigError(
                    f"the controller {address} is not loopback: give {name} (--{option})"
                )

    async def __aenter__(self) -> Self:
        check_certificates(self._security)
        self._channel = open_channel(self._address, self._credentials)
        self._metadata = call_metadata(self._credentials, self._run_id)
        self._environments = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    @classmethod
    @checked
    def of_run(cls, run: str | Path | FoundRun | None = None) -> Self:
        """Returns the client of the run whose folder, or name below `runs`, is `run`.

        None means the only run that goes on there. The credentials are those of the run's settings.
        Raises ConfigError if the folder has no address of a controller.
        """
        found_run = run if isinstance(run, FoundRun) else find_run(run)
        security = found_run.security
        client = cls(
            found_run.address,
            token_file=security.token_file,
            # Without an authority the run's own parts trust its certificate, too.
            tls_ca=security.tls_ca or security.tls_certificate,
            tls_certificate=security.tls_certificate,
            tls_key=security.tls_key,
            run_id=found_run.run_id,
        )
        if found_run.told:
            client._no_answer = f"{found_run.told}: {client._no_answer}"
            client._to_do = ""
        return client

    @checked
    async def submit(
        self,
        reference: str,
        *,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        weight: float = 1.0,
        timeout_s: float = 60.0,
        num_workers: Count = 1,
        search_path: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        python: str | Path | None = None,
        adapter: str = "",
    ) -> EnvironmentStatus:
        """Adds an environment that the rollout servers run in worker processes; returns its status.

        `reference` is "package.module:Class", `name` by default the class's name in lower case,
        `args` the class's keyword arguments. `weight` is the environment's share of the trained
        groups, `timeout_s` the limit of one reset or step, `adapter` a name in lora.adapters.
        `chat_template_kwargs` are passed to the chat template. Each server starts `num_workers`
        worker processes. The servers look for the module in the folder `search_path` of their
        machines, by default the path of this process's working directory, or off loopback that of
        the run's own environments. `python` is the workers'
        interpreter there, by default the servers' own. Raises EnvironmentFailed when no worker
        could load the environment and reset its first task.
        """
        spec = environment_pb2.EnvironmentSpec(
            purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            reference=reference,
            name=name or reference.rpartition(":")[2].lower(),
            args_json=json_object("args", args, allow_nan=True),
            weight=weight,
            timeout_s=timeout_s,
            num_workers=num_workers,
            search_path=str(search_path or (os.getcwd() if is_loopback(self._address) else "")),
            python=str(Path(search_path or os.getcwd(), python)) if python else "",
            chat_template_kwargs_json=values_json(chat_template_kwargs),
            adapter=adapter,
        )
        # The controller refuses a value that is no limit.
        reset_s = timeout_s if 0 < timeout_s < MOST_TIMEOUT_S else 0.0
        request = environment_pb2.SubmitEnvironmentRequest(spec=spec)
        submit = self._environments.SubmitEnvironment
        response = await self._ask(submit, request, limit_s=SUBMIT_TIMEOUT_S + reset_s)
        status = environment_from_pb(response.status)
        if status.state == "suspended":
            raise EnvironmentFailed(
                trajectory_pb2.FAILURE_KIND_ENVIRONMENT,
                f"environment {status.name}: {status.cause}",
            )
        return status

    @checked
    async def serve(
        self,
        environment: AnyEnvironment,
        *,
        name: str | None = None,
        episodes: Count = 64,
        weight: float = 1.0,
        timeout_s: float = 60.0,
        connect_timeout_s: Patience = 60.0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> None:
        """Runs the episodes of `environment` in this process until the run ends.

        At most `episodes` are open at one time. The call waits up to `connect_timeout_s` for a
        controller that does not listen yet, without a word if that is infinite, and up to
        `reconnect_timeout_s` for a lost controller; after a reconnection open episodes begin again.
        Cancel the call to leave earlier. The other arguments are as in `submit`. The first
        failures are told on stderr, and a warning tells why the run failed. Raises
        EnvironmentFailed if the environment gives no tasks, or when the run suspends it, as after
        many failures in a row.
        """
        host = EpisodeHost(environment)
        spec = environment_pb2.EnvironmentSpec(
            purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            name=name or type(environment).__name__.lower(),
            weight=weight,
            timeout_s=timeout_s,
            num_workers=1,
            chat_template_kwargs_json=values_json(chat_template_kwargs),
            adapter=adapter,
        )
        hello = environment_pb2.WorkerHello(
            spec=spec, num_tasks=host.num_tasks, digest=host.digest(), max_episodes=episodes
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        is_told = math.isinf(connect_timeout_s)
        while True:
            # The first answer tells a wrong address from a controller that is lost later.
            try:
                await self.status()
                break
            except NoController as error:
                no_answer = str(error).removesuffix(self._to_do)
                if loop.time() - began_s >= connect_timeout_s:
                    raise ConfigError(f"{no_answer} within {connect_timeout_s:g} s") from None
                if not is_told:
                    logger.warning("%s yet; waiting for up to %g s", no_answer, connect_timeout_s)
                is_told = True
                await asyncio.sleep(min(LOOK_S, connect_timeout_s))
        patience = ReconnectLimit(self._reconnect_timeout_s)

        while True:
            open_call = partial(self._environments.ServeEpisodes, metadata=self._metadata)
            try:
                call = await open_stream(open_call, hello)
                try:
                    await answer_commands(host, self._messages(call, patience), call.write)
                finally:
                    call.cancel()
                ending = grpc.StatusCode.OK, ""
            except grpc.aio.AioRpcError as error:
                ending = error.code(), error.details() or ""
            if ending[0] is grpc.StatusCode.ABORTED:
                logger.warning("%s", ending[1])
                return
            # gRPC hides from a client that writes meanwhile how its stream has ended.
            has_ended = ending[0] in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)
            # A controller that still knows the lost stream refuses a new one for a while.
            may_pass = has_ended or (patience.served and ending[0] in REFUSED)
            is_over = may_pass and await self._is_over(spec.name if has_ended else "")
            if is_over or ending[0] is grpc.StatusCode.OK:
                return
            if not (may_pass or ending[0] in LOST) or not await patience.wait(ending[1]):
                raise self._error(*ending)

    async def _is_over(self, served: str) -> bool:
        """Whether the run is over; tells its failure.

        Raises EnvironmentFailed if the run goes on without the environment `served`.
        """
        try:
            run = await self.status()
        except SlipstreamError:
            return False
        if run.state == "failed":
            logger.warning("the run failed: %s", run.cause)
        for environment in run.environments if not run.is_over else ():
            if environment.name == served and environment.state == "suspended":
                kind = trajectory_pb2.FAILURE_KIND_ENVIRONMENT
                raise EnvironmentFailed(
                    kind, f"environment {served} is suspended: {environment.cause}"
                )
        return run.is_over

    async def environments(self) -> tuple[EnvironmentStatus, ...]:
        """Returns all environments of the run."""
        request = environment_pb2.ListEnvironmentsRequest()
        response = await self._ask(self._environments.ListEnvironments, request)
        return tuple(environment_from_pb(entry) for entry in response.environments)

    async def status(self) -> RunStatus:
        """Returns the state of the run at this moment."""
        run = run_from_pb(await self._ask(self._status.GetStatus, status_pb2.GetStatusRequest()))
        if self._run_id is None:
            self._run_id = run.run_id
            self._metadata = call_metadata(self._credentials, run.run_id)
        return run

    @checked
    async def stop(self, reason: str) -> None:
        """Asks the run to end normally, after the current step."""
        await self._ask(self._status.StopRun, status_pb2.StopRunRequest(reason=reason))

    @checked
    async def drain(self, server_id: str, reason: str) -> str:
        """Asks one rollout server to end or return its episodes, and to leave the run.

        Returns a warning on what the run lacks without this server, or "" if it lacks nothing.
        """
        request = status_pb2.DrainServerRequest(server_id=server_id, reason=reason)
        return str((await self._ask(self._status.DrainServer, request)).warning)

    @checked
    async def watch(self, after: NotNegative = 0) -> AsyncIterator[Event]:
        """Yields events with a larger number than `after`, as they happen, until the run ends."""
        patience = ReconnectLimit(self._reconnect_timeout_s)
        while True:
            call = self._status.Watch(status_pb2.WatchRequest(after=after), metadata=self._metadata)
            ending = (grpc.StatusCode.UNAVAILABLE, "the stream ended")
            try:
                async for message in self._messages(call, patience):
                    after = message.number
                    yield event_from_pb(message)
                    if message.final_state:
                        return
            except grpc.aio.AioRpcError as error:
                ending = error.code(), error.details() or ""
            finally:
                call.cancel()
            if ending[0] not in LOST or not patience.served or not await patience.wait(ending[1]):
                raise self._error(*ending)

    async def _messages(
        self,
        call: Any,  # noqa: ANN401 - a stream of either shape
        patience: "ReconnectLimit",
    ) -> AsyncIterator[Any]:
        """Yields a stream's messages; raises AioRpcError if it leads to no controller any more."""
        clock = asyncio.get_running_loop().time
        began_s = clock()

        async def ask() -> None:
            run = await self._status.GetStatus(
                status_pb2.GetStatusRequest(), metadata=self._metadata, timeout=CALL_TIMEOUT_S
            )
            # Clocks of two hosts differ a little.
            if run.uptime_s < 0.99 * (clock() - began_s) - 1.0:
                raise broken_stream("another controller has started since the stream began")

        async for message in asking_in_silence(call.read, ask):
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            patience.succeeded()
            yield message

    async def _ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        limit_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        if self._run_id is None and method is not self._status.GetStatus:
            await self.status()
        try:
            return await method(request, timeout=limit_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code(), error.details() or "") from None

    def _error(self, code: grpc.StatusCode, details: str) -> SlipstreamError:
        """Returns the error for a status of gRPC, with the controller's address and the remedy."""
        address = self._address
        cause = cause_of(code, details)
        if code is grpc.StatusCode.UNAVAILABLE:
            if cause.startswith(UNTRUSTED):
                return ConfigError(f"{address}: {cause}")
            if "handshake" in details.lower():
                return ConfigError(f"{address} does not speak TLS as expected: {details}")
            if "Socket closed" in details and self._credentials.ca is None:
                return ConfigError(f"{address} hung up: does it want TLS (tls_ca)?")
            cause = cause.rpartition("last error: ")[2]
            # A refused connection means that nothing listens, which is said already.
            cause = "" if "Connection refused" in cause else f" ({cause})"
            return NoController(f"{self._no_answer}{cause}{self._to_do}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"what answers at {address} is no controller of this version")
        if code is grpc.StatusCode.UNAUTHENTICATED and self._credentials.token is None:
            return ConfigError(
                f"the controller at {address} asks for its run's token: name the run, or give "
                "token_file (--token-file), the file `token` of the run's folder"
            )
        if code in REFUSED:
            return ConfigError(details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return SlipstreamError(f"the controller at {address} gave no answer in time")
        return SlipstreamError(f"the controller at {address} failed: {details or code.name}")


class NoController(ConfigError):
    """Nothing listens at the address."""


class ReconnectLimit:
    """Waits between attempts to reach a lost controller, longer each time, up to a limit."""

    def __init__(self, limit_s: float = RECONNECT_TIMEOUT_S) -> None:
        """Allows attempts for `limit_s` seconds after the controller was lost."""
        self.served = False
        self._limit_s = limit_s
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._lost_at_s: float | None = None

    def succeeded(self) -> None:
        """Records that the controller answered, which resets the waits."""
        self.served = True
        self._backoff.reset()
        self._lost_at_s = None

    async def wait(self, cause: str) -> bool:
        """Waits before the next attempt and returns True; returns False when no time is left."""
        now_s = asyncio.get_running_loop().time()
        self._lost_at_s = self._lost_at_s or now_s
        if now_s + self._backoff.next_s > self._lost_at_s + self._limit_s:
            return False
        logger.warning("lost the controller (%s); retrying in %.1f s", cause, self._backoff.next_s)
        await asyncio.sleep(self._backoff.take_s())
        return True
