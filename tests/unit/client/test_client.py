import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from slipstream.client import Client
from slipstream.client.cli import parse
from slipstream.client.environment import TaskSource
from slipstream.client.episode_host import digest_of
from slipstream.client.requests import status_lines
from slipstream.client.run_folder import find_run, hold_folder
from slipstream.core import waits
from slipstream.core.errors import ConfigError, EnvironmentFailed, SlipstreamError
from slipstream.core.machine.address import free_port
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    fleet_pb2,
    status_pb2,
    status_pb2_grpc,
    trajectory_pb2,
)
from support.fakes.fake_workers import Empty, Good
from support.rigs.bad_network import BadNetwork
from support.rigs.waiting import LIMIT_S, until

TOKEN = "k" * 32
TOOLS = {"chat_template_kwargs": {"tools": 1}}

Stream = Callable[["Call"], object]


class Call:
    """One ServeEpisodes stream at the controller: commands out, answers in."""

    def __init__(
        self, requests: AsyncIterator, context: grpc.aio.ServicerContext
    ) -> None:
        self.context = context
        self._requests = requests

    async def read(self) -> environment_pb2.WorkerMessage:
        return await asyncio.wait_for(anext(self._requests), LIMIT_S)

    async def ask(self, **command: object) -> environment_pb2.WorkerMessage:
        await self.context.write(environment_pb2.WorkerCommand(call_id=1, **command))
        return await self.read()

    async def reset(self, key: str) -> environment_pb2.WorkerMessage:
        return await self.ask(reset=environment_pb2.ResetCommand(episode_key=key))


class Controller(
    environment_pb2_grpc.EnvironmentServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
):
    """Answers as it was told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.submitted: list[environment_pb2.EnvironmentSpec] = []
        self.state = environment_pb2.ENVIRONMENT_STATE_READY
        self.status = status_pb2.RunStatus(state=status_pb2.RUN_STATE_RUNNING)
        self.stopped: list[str] = []
        self.drained: list[tuple[str, str]] = []
        # Episodes that the run lacks without the server that drains.
        self.lacking = ""
        # The acts of each stream of ServeEpisodes, one after the other.
        self.streams: list[Stream] = []
        # Events of each Watch stream before it breaks; None: nothing more, for ever.
        self.events: list[list[status_pb2.Event | None]] = []
        self.watched_after: list[int] = []
        self.breaks_with = grpc.StatusCode.UNAVAILABLE

    async def SubmitEnvironment(self, request, context):  # noqa: N802
        if self.refusal is not None:
            await context.abort(*self.refusal)
        self.submitted.append(request.spec)
        status = environment_pb2.EnvironmentStatus(
            spec=request.spec, state=self.state, num_tasks=7, cause="no such module"
        )
        return environment_pb2.SubmitEnvironmentResponse(status=status)

    async def ListEnvironments(self, request, context):  # noqa: N802
        entries = [
            environment_pb2.EnvironmentStatus(
                spec=spec,
                state=environment_pb2.ENVIRONMENT_STATE_PENDING,
                reward_mean=0.5,
            )
            for spec in self.submitted
        ]
        return environment_pb2.ListEnvironmentsResponse(environments=entries)

    async def ServeEpisodes(self, requests, context):  # noqa: N802
        await self.streams.pop(0)(Call(requests, context))

    async def GetStatus(self, request, context):  # noqa: N802
        return self.status

    async def Watch(self, request, context):  # noqa: N802
        self.watched_after.append(request.after)
        for event in self.events.pop(0):
            if event is None:
                await asyncio.Event().wait()
            yield event
        await context.abort(self.breaks_with, "going down")

    async def DrainServer(self, request, context):  # noqa: N802
        self.drained.append((request.server_id, request.reason))
        return status_pb2.DrainServerResponse(warning=self.lacking)

    async def StopRun(self, request, context):  # noqa: N802
        self.stopped.append(request.reason)
        return status_pb2.StopRunResponse()


@asynccontextmanager
async def listening(controller, token=None, address="127.0.0.1:0"):
    credentials = Credentials(token=token)
    server = create_server(credentials)
    if controller is not None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
            controller, server
        )
        status_pb2_grpc.add_StatusServiceServicer_to_server(controller, server)
    port = bind(server, address, credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
async def client(controller: Controller) -> AsyncIterator[Client]:
    async with listening(controller) as address, Client(address) as client:
        yield client


async def test_submit_describes_the_environment_and_returns_its_status(
    client: Client, controller: Controller, tmp_path: Path
) -> None:
    status = await client.submit("package.module:Sums", args={"digits": 3})
    assert (status.name, status.state, status.num_tasks) == ("sums", "ready", 7)
    assert status.reference == "package.module:Sums"
    await client.submit(
        "m:C",
        name="other",
        weight=2.5,
        timeout_s=3,
        num_workers=4,
        search_path=tmp_path,
        python=Path("venv/bin/python"),
        chat_template_kwargs={"enable_thinking": False},
        adapter="math",
    )
    first, second = controller.submitted
    assert first == environment_pb2.EnvironmentSpec(
        name="sums",
        reference="package.module:Sums",
        args_json='{"digits": 3}',
        weight=1.0,
        timeout_s=60.0,
        num_workers=1,
        search_path=os.getcwd(),
        purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
    )
    assert (second.name, second.weight, second.timeout_s) == ("other", 2.5, 3.0)
    assert (second.num_workers, second.search_path) == (4, str(tmp_path))
    assert second.python == str(tmp_path / "venv" / "bin" / "python")
    kwargs = second.chat_template_kwargs_json
    assert (second.adapter, kwargs) == ("math", '{"enable_thinking": false}')


async def test_an_environment_that_no_worker_could_load_raises_with_the_cause(
    client, controller
):
    controller.state = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
    with pytest.raises(
        EnvironmentFailed, match="environment c: no such module"
    ) as caught:
        await client.submit("m:C")
    assert caught.value.kind == trajectory_pb2.FAILURE_KIND_ENVIRONMENT


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            ConfigError,
            "weight must be above 0, got -1",
        ),
        (
            grpc.StatusCode.FAILED_PRECONDITION,
            ConfigError,
            "weight must be above 0, got -1",
        ),
        (
            grpc.StatusCode.INTERNAL,
            SlipstreamError,
            r"the controller at .* failed: weight",
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, SlipstreamError, "gave no answer in time"),
        (
            grpc.StatusCode.UNAVAILABLE,
            ConfigError,
            "no controller answers at .*; start a run, or",
        ),
    ],
)
async def test_a_refusal_becomes_an_error_of_ours_in_one_line(
    client, controller, code, error, said
):
    controller.refusal = code, "weight must be above 0, got -1"
    with pytest.raises(error, match=said) as caught:
        await client.submit("m:C")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("Socket closed", "hung up: does it want TLS"),
        (
            "Tls handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            r"certificate is refused \(certificate has expired\): .*make_certificates.sh issues",
        ),
        (
            "Tls handshake failed: CERTIFICATE_VERIFY_FAILED: self-signed certificate: OK",
            r"certificate is refused \(self-signed certificate\): is security.tls_ca its authority",
        ),
        (
            "Custom verification check failed: Hostname Verification Check failed.",
            r"certificate is refused \(Hostname Verification Check failed\): .*issues a new one",
        ),
        (
            "Ssl handshake failed: WRONG_VERSION_NUMBER",
            "does not speak TLS as expected: Ssl",
        ),
        (
            "errors resolving x: [a,\n b]",
            r"\(errors resolving x: \[a, b\]\); start a run",
        ),
        (
            "to all addresses; last error: UNKNOWN: No route",
            r"\(UNKNOWN: No route\); start a run",
        ),
    ],
)
async def test_why_a_controller_is_not_reached_is_told(
    client, controller, details, said
):
    controller.refusal = grpc.StatusCode.UNAVAILABLE, details
    with pytest.raises(ConfigError, match=f"{controller.address}.* {said}"):
        await client.submit("m:C")


async def test_arguments_that_are_no_json_are_refused_before_they_are_sent(
    client: Client,
) -> None:
    with pytest.raises(ConfigError, match="args must be a JSON object: "):
        await client.submit("m:C", args={"x": object()})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": "a"}, "weight must be a number, got 'a'"),
        ({"timeout_s": None}, "timeout_s must be a number, got None"),
        ({"name": 3}, "name must be a text, got 3"),
        (
            {"adapter": "\ud800"},
            "adapter must be without surrogates and NUL, got '.ud800'",
        ),
        ({"num_workers": 1.5}, "num_workers must be a whole number, got 1.5"),
        ({"episodes": -1}, "episodes must be at least 1, got -1"),
        ({"episodes": 2**40}, "episodes must be at most 2147483647, got 1099511627776"),
    ],
)
async def test_arguments_of_another_kind_are_named(
    client: Client, given, said: str
) -> None:
    calls = []
    if "episodes" not in given:
        calls.append(client.submit("m:C", **given))
    if "num_workers" not in given:
        calls.append(client.serve(Good(), **given))
    for call in calls:
        with pytest.raises(ConfigError, match=said):
            await call


async def test_a_reference_that_is_no_text_is_named(client: Client) -> None:
    with pytest.raises(ConfigError, match="reference must be a text, got <class"):
        await client.submit(Good)  # type: ignore[arg-type]


async def test_values_that_a_template_cannot_have_are_refused_before_they_are_sent(
    client,
):
    for call in (client.submit("m:C", **TOOLS), client.serve(Good(), **TOOLS)):
        with pytest.raises(
            ConfigError, match="chat_template_kwargs must not set 'tools'"
        ):
            await call


async def test_an_address_without_a_controller_is_named() -> None:
    async with Client("127.0.0.1:9") as client:
        serving = client.serve(Good(), connect_timeout_s=0.1)
        for call in (client.status(), client.stop("x"), serving):
            with pytest.raises(
                ConfigError, match="no controller answers at 127.0.0.1:9"
            ) as e:
                await call
            # No traceback of gRPC comes before it.
            assert e.value.__suppress_context__ and e.value.__cause__ is None
        what_to_do = "; start a run, or give the address of its controller, HOST:PORT$"
        with pytest.raises(ConfigError, match=what_to_do):
            await client.status()
        with pytest.raises(ConfigError, match="no controller answers at 127.0.0.1:9"):
            await anext(client.watch())


async def test_a_run_that_has_ended_is_named_where_no_controller_answers(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "controller.address").write_text("127.0.0.1:9\n")
    (tmp_path / "summary.json").write_text('{"state": "finished", "steps": 7}')
    message = (
        f"^{tmp_path} is finished with 7 steps: no controller answers at 127.0.0.1:9$"
    )
    async with Client.of_run(str(tmp_path)) as client:
        with pytest.raises(ConfigError, match=message):
            await client.stop("x")


async def test_a_run_that_was_cut_off_is_told_where_no_controller_answers(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "controller.address").write_text("127.0.0.1:9\n")

    async def said() -> str:
        async with Client.of_run(str(tmp_path)) as client:
            with pytest.raises(ConfigError) as error:
                await client.status()
        return str(error.value)

    cut = f"{tmp_path} was cut off after step"
    answers = "no controller answers at 127.0.0.1:9"
    assert await said() == f"{cut} 0, and the same command resumes it: {answers}"
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 6.0}\n{"step": 7.0}\n{"evaluation_step": 7.0}\n{"step": 8'
    )
    at = f"{datetime.fromtimestamp(metrics.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
    assert (
        await said() == f"{cut} 7 at {at}, and the same command resumes it: {answers}"
    )
    (tmp_path / "controller.address").write_text("192.0.2.1:9\n")
    assert find_run(str(tmp_path)).told == "", "it may go on there"
    (tmp_path / "controller.address").write_text("127.0.0.1:9\n")
    with hold_folder(tmp_path, refusal=""):
        assert (
            await said()
            == f"{tmp_path} goes on, and its controller may be starting: {answers}"
        )


async def test_another_service_at_the_address_is_named() -> None:
    async with listening(None) as address, Client(address) as client:
        for call in (client.status(), client.serve(Good())):
            with pytest.raises(
                ConfigError, match=f"{address} is no controller of this version"
            ):
                await call


async def test_what_answers_in_place_of_a_controller_is_told() -> None:
    async with BadNetwork("127.0.0.1:9") as network, Client(network.address) as client:
        network.page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        message = (
            rf"no controller answers at {network.address} \(.*HTTP status 502.*\); "
            rf"start a run"
        )
        with pytest.raises(ConfigError, match=message):
            await client.status()
        message = (
            rf"no controller answers at {network.address} \(.*HTTP status 502.*\) "
            rf"within 0.1 s$"
        )
        with pytest.raises(ConfigError, match=message):
            await client.serve(Good(), connect_timeout_s=0.1)


async def test_a_wrong_token_is_reported(
    controller: Controller, tmp_path: Path
) -> None:
    right = tmp_path / "right"
    wrong = tmp_path / "wrong"
    right.write_text(TOKEN)
    wrong.write_text("w" * 32)
    async with listening(controller, TOKEN) as address:
        async with Client(address, token_file=right) as client:
            assert (await client.status()).state == "running"
        async with Client(address, token_file=wrong) as client:
            for call in (client.status(), client.serve(Good())):
                with pytest.raises(ConfigError, match="the token is missing or wrong"):
                    await call


def test_an_address_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(
        ConfigError, match="an address is host:port with a port up to 65535"
    ):
        Client("localhost")
    far = r"the controller 10.0.0.1:7070 is not loopback: give tls_ca \(--tls-ca\)"
    with pytest.raises(ConfigError, match=far):
        Client("10.0.0.1:7070")


async def test_status_and_environments_are_plain_values(client, controller):
    await client.submit("m:C")
    (entry,) = await client.environments()
    assert (entry.name, entry.state, entry.reward_mean) == ("c", "pending", 0.5)
    controller.status = status_pb2.RunStatus(
        run_id="r",
        state=status_pb2.RUN_STATE_FINISHED,
        step=3,
        servers=[
            status_pb2.ServerStatus(
                server_id="s",
                state=fleet_pb2.SERVER_STATE_SERVING,
                version=trajectory_pb2.PolicyVersion(incarnation=1, step=2),
                report=fleet_pb2.ServerReport(generated_tokens=9),
            )
        ],
        ledger=status_pb2.Ledger(generated=9, trained=9, difference=0, gaps=["lost"]),
        metrics={"reward_mean": 0.5},
    )
    status = await client.status()
    assert (status.run_id, status.state, status.step, status.is_over) == (
        "r",
        "finished",
        3,
        True,
    )
    (server,) = status.servers
    assert (server.state, str(server.version), server.generated_tokens) == (
        "serving",
        "2/1",
        9,
    )
    assert (status.ledger.trained, status.metrics) == (9, {"reward_mean": 0.5})
    assert "the ledger is open, lost" in status_lines(status)


async def test_stop_hands_the_reason_on(client: Client, controller: Controller) -> None:
    await client.stop("enough")
    assert controller.stopped == ["enough"]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL]
)
async def test_watch_goes_on_after_a_lost_stream_and_ends_with_the_run(
    client, controller, code
):
    # A proxy between them that ends a stream does so with INTERNAL.
    controller.breaks_with = code
    controller.events = [
        [status_pb2.Event(number=n, text=f"event {n}") for n in (4, 5)],
        [],
        [
            status_pb2.Event(
                number=6, severity=status_pb2.SEVERITY_WARNING, metrics={"a": 1}
            ),
            status_pb2.Event(number=7, final_state=status_pb2.RUN_STATE_FINISHED),
        ],
    ]
    events = [event async for event in client.watch(after=3)]
    assert [event.number for event in events] == [4, 5, 6, 7]
    assert (events[2].severity, events[2].metrics) == ("warning", {"a": 1.0})
    assert [event.final_state for event in events] == ["", "", "", "finished"]
    assert controller.watched_after == [3, 5, 5]


async def test_watch_leaves_a_stream_that_another_controller_does_not_know(
    client, controller, monkeypatch
) -> None:
    monkeypatch.setattr(waits, "SILENT_S", 0.2)
    last = status_pb2.Event(number=2, final_state=status_pb2.RUN_STATE_FINISHED)
    controller.events = [[status_pb2.Event(number=1), None], [last]]
    events = [event async for event in client.watch()]
    assert [event.final_state for event in events] == ["", "finished"]


async def test_serve_leaves_a_stream_that_another_controller_does_not_know(
    client, controller, monkeypatch
) -> None:
    monkeypatch.setattr(waits, "SILENT_S", 0.2)

    async def silent(call: Call) -> None:
        assert (await call.read()).HasField("hello")
        await asyncio.Event().wait()

    async def ending(call: Call) -> None:
        controller.status.uptime_s = 1e9
        assert (await call.reset("a")).HasField("hello")

    controller.streams = [silent, ending]
    await asyncio.wait_for(client.serve(Good()), LIMIT_S)
    assert not controller.streams


async def test_serve_answers_the_controller_until_it_ends_the_stream(
    client, controller
):
    seen = []

    async def stream(call: Call) -> None:
        seen.append(await call.read())
        seen.append(await call.reset("a"))
        step = environment_pb2.StepCommand(episode_key="a", reply="x")
        seen.append(await call.ask(step=step))

    controller.streams = [stream]
    await asyncio.wait_for(
        client.serve(Good(), episodes=5, weight=2.0, timeout_s=9.0), LIMIT_S
    )
    hello, observation, verdict = seen
    assert hello.hello == environment_pb2.WorkerHello(
        spec=environment_pb2.EnvironmentSpec(
            name="good",
            weight=2.0,
            timeout_s=9.0,
            num_workers=1,
            purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
        ),
        num_tasks=3,
        max_episodes=5,
        digest=digest_of(TaskSource(Good())),
    )
    assert observation.observation.messages[0].content == "one 0"
    assert verdict.verdict.reward == 0.25


async def test_serve_comes_back_to_a_controller_that_was_lost(client, controller):
    answers = []

    async def breaking(call: Call) -> None:
        assert (await call.read()).HasField("hello")
        answers.append(await call.reset("a"))
        await call.context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    async def refusing(call: Call) -> None:
        await call.context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, "it is served already"
        )

    async def ending(call: Call) -> None:
        assert (await call.read()).HasField("hello")
        answers.append(await call.reset("a"))

    async def idle(call: Call) -> None:
        await call.read()
        await call.context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    controller.streams = [idle, breaking, refusing, breaking, ending]
    await asyncio.wait_for(client.serve(Good()), LIMIT_S)
    assert [answer.HasField("observation") for answer in answers] == [True, True, True]


async def test_serve_ends_when_the_run_was_over_before_it_came_back(client, controller):

    async def breaking(call: Call) -> None:
        await call.read()
        await call.reset("a")
        controller.status.state = status_pb2.RUN_STATE_FINISHED
        await call.context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    async def refusing(call: Call) -> None:
        await call.context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the run is over")

    # A refusal that comes before the hello is written hides why: the client asks a second time.
    controller.streams = [breaking, refusing, refusing]
    await asyncio.wait_for(client.serve(Good()), LIMIT_S)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL])
async def test_serve_asks_why_its_stream_has_ended(
    client, controller, caplog, code
) -> None:
    async def ending(call: Call) -> None:
        await call.read()
        if code is not grpc.StatusCode.OK:
            await call.context.abort(code, "Internal error from Core")

    spec = environment_pb2.EnvironmentSpec(name="good")
    suspended = environment_pb2.EnvironmentStatus(
        spec=spec, state=environment_pb2.ENVIRONMENT_STATE_SUSPENDED, cause="it fails"
    )
    controller.status.environments.append(suspended)
    controller.streams = [ending, ending]
    with pytest.raises(
        EnvironmentFailed, match="^environment good is suspended: it fails$"
    ):
        await asyncio.wait_for(client.serve(Good()), LIMIT_S)
    controller.status.state = status_pb2.RUN_STATE_FAILED
    controller.status.cause = "no environment is left"
    await asyncio.wait_for(client.serve(Good()), LIMIT_S)
    assert [record.getMessage() for record in caplog.records] == [
        "the run failed: no environment is left"
    ]


async def test_serve_gives_up_a_controller_that_stays_lost(
    controller: Controller,
) -> None:
    attached = asyncio.Event()

    async def waiting(call: Call) -> None:
        await call.read()
        await call.reset("a")
        attached.set()
        await asyncio.Event().wait()

    controller.streams = [waiting]
    async with asyncio.timeout(LIMIT_S):
        async with listening(controller) as address:
            client = await Client(address, reconnect_timeout_s=0.1).__aenter__()
            serving = asyncio.ensure_future(client.serve(Good()))
            await attached.wait()
        with pytest.raises(ConfigError, match=f"no controller answers at {address}"):
            await serving
        await client.__aexit__(None, None, None)


async def test_serve_reports_a_first_refusal(
    client: Client, controller: Controller
) -> None:
    async def refusing(call: Call) -> None:
        await call.read()
        cause = "episodes must be at least the group size 16, got 5"
        await call.context.abort(grpc.StatusCode.FAILED_PRECONDITION, cause)

    controller.streams = [refusing]
    with pytest.raises(
        ConfigError, match="episodes must be at least the group size 16, got 5"
    ):
        await client.serve(Good(), episodes=5)


async def test_serve_tells_the_first_few_different_failures_on_stderr(
    client, controller, capsys
):
    causes = iter("aabcdefg")

    class Broken(Good):
        def reset(self, task):
            raise ValueError(next(causes))

    async def stream(call: Call) -> None:
        await call.read()
        for key in "stuvwxyz":
            assert (await call.reset(key)).HasField("failure")

    controller.streams = [stream]
    await asyncio.wait_for(client.serve(Broken()), LIMIT_S)
    place = f"{Path(__file__).name}:{Broken.reset.__code__.co_firstlineno + 1} in reset"
    messages = [f"reset failed: ValueError: {cause} ({place})" for cause in "abcde"]
    assert capsys.readouterr().err.splitlines() == messages


async def test_serve_refuses_an_environment_without_tasks(client: Client) -> None:
    with pytest.raises(EnvironmentFailed, match=r"Empty.tasks\(\) gives no task"):
        await client.serve(Empty())


async def test_cancelling_serve_ends_the_stream(
    client: Client, controller: Controller
) -> None:
    attached = asyncio.Event()
    ended = asyncio.Event()

    async def waiting(call: Call) -> None:
        await call.read()
        attached.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    controller.streams = [waiting]
    async with asyncio.timeout(LIMIT_S):
        serving = asyncio.ensure_future(client.serve(Good()))
        await attached.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await ended.wait()


async def test_the_command_drains_the_server_that_it_names(capsys) -> None:
    controller = Controller()
    async with listening(controller) as address:
        arguments = parse(
            ["drain", "server-1", "--reason", "new driver", "--controller", address]
        )
        assert await arguments.execute(arguments) == 0
        assert capsys.readouterr().out == "rollout server server-1 drains\n"
        controller.lacking = "no rollout server stays"
        assert await arguments.execute(arguments) == 0
    drains = "rollout server server-1 drains\n! no rollout server stays\n"
    assert capsys.readouterr().out == drains
    assert controller.drained == [("server-1", "new driver")] * 2


async def test_a_controller_that_does_not_listen_yet_is_waited_for(caplog):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    controller = Controller()
    served = asyncio.Event()

    async def serve(call: Call) -> None:
        served.set()
        await call.context.abort(grpc.StatusCode.UNIMPLEMENTED, "enough")

    # The stream is served twice: the client may ask a second time for the reason.
    controller.streams = [serve, serve]
    async with asyncio.timeout(LIMIT_S), Client(address) as client:
        serving = asyncio.ensure_future(client.serve(Good()))
        await until(lambda: "no controller answers" in caplog.text)
        async with listening(controller, address=address):
            await served.wait()
            with pytest.raises(ConfigError, match="no controller of this version"):
                await serving
    assert (
        f"no controller answers at {address} yet; waiting for up to 60 s" in caplog.text
    )


async def test_scalars_of_numpy_are_sent_as_the_numbers_that_they_hold(
    client: Client, controller: Controller
) -> None:
    settings = {
        "digits": np.int64(3),
        "rates": [np.float32(0.5)],
        "sure": np.bool_(True),
    }
    await client.submit(
        "m:C", args=settings, weight=np.float32(2.5), num_workers=np.int64(4)
    )
    (spec,) = controller.submitted
    assert (spec.args_json, spec.weight) == (
        '{"digits": 3, "rates": [0.5], "sure": true}',
        2.5,
    )
    assert spec.num_workers == 4
    with pytest.raises(
        ConfigError, match=r"args must be a JSON object: array\(.* is no value of"
    ):
        await client.submit("m:C", args={"a": np.zeros(2)})


@pytest.mark.parametrize("timeout_s", [1e15, -1])
async def test_a_limit_that_is_none_reaches_the_controller_which_refuses_it(
    client: Client, timeout_s: float
) -> None:
    # A deadline that gRPC cannot have would have passed before the call.
    with pytest.raises(ConfigError, match="timeout_s must be between 0 and 1e.07, got"):
        await client.submit("m:C", timeout_s=timeout_s)
