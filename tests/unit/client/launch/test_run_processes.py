"""The processes of one command, with a controller that only listens."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from slipstream.client.launch import run_processes
from slipstream.client.launch.children import Child
from slipstream.client.launch.placement import Placement
from slipstream.client.launch.run_processes import RunCalls, RunProcesses, end_in_order
from slipstream.client.run_folder import write_config
from slipstream.client.terminal import this_command
from slipstream.core import patience
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.machine.address import free_port
from slipstream.core.machine.files import OwnedFolder
from slipstream.core.settings.config import Config
from slipstream.protocol.access.run_token import make_run_token, run_credentials
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.small_configs import config_of, small_config
from support.rigs.waiting import LIMIT_S, until

OPEN = Credentials()


class Listening(status_pb2_grpc.StatusServiceServicer):
    """Keeps with which words the run was stopped."""

    def __init__(self) -> None:
        self.stopped: asyncio.Queue[status_pb2.StopRunRequest] = asyncio.Queue()

    async def StopRun(  # noqa: N802
        self, request: status_pb2.StopRunRequest, context: object
    ) -> status_pb2.StopRunResponse:
        self.stopped.put_nowait(request)
        return status_pb2.StopRunResponse()


@contextlib.asynccontextmanager
async def at_an_address(controller: Listening) -> AsyncIterator[str]:
    server = create_server(OPEN)
    status_pb2_grpc.add_StatusServiceServicer_to_server(controller, server)
    port = bind(server, "127.0.0.1:0", OPEN)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.process
async def test_a_server_for_which_the_machine_has_no_process_ends_the_run_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Listening()
    async with at_an_address(controller) as address:
        config = small_config(
            run={"dir": str(tmp_path)}, controller={"address": address}
        )
        async with RunProcesses(config, OPEN, Placement()) as processes:
            monkeypatch.setattr(sys, "executable", "/missing/python")
            processes.keep_rollout_server(0)
            request = await asyncio.wait_for(controller.stopped.get(), LIMIT_S)
    cause = "rollout server server-0 cannot be started: No such file or directory"
    assert (request.reason, request.failed) == (cause, True)


async def test_each_server_is_told_its_own_memory_and_episodes(tmp_path, monkeypatch):
    settings: dict[str, list[str]] = {}

    async def start(
        _config: Config,
        name: str,
        _module: str,
        arguments: Sequence[str],
        _environ: object,
    ) -> Child:
        settings[name] = [word.partition("rollout_server.")[2] for word in arguments]
        raise OSError(0, "enough")

    monkeypatch.setattr(run_processes, "start_in_run", start)
    places = Placement(("0",), (("1",), ("0",)), memory=(0.9, 0.3))
    config = small_config(
        run={"dir": str(tmp_path)}, rollout_server={"max_episodes": 16}
    )
    async with RunProcesses(config, OPEN, places) as processes:
        monkeypatch.setattr(processes, "_stop_run", lambda *_, **__: asyncio.sleep(0))
        for number in range(2):
            processes.keep_rollout_server(number)
        await asyncio.gather(*processes._servers.values())
    for name, memory, episodes in (("server-0", 0.9, 16), ("server-1", 0.3, 5)):
        assert f"gpu_memory_utilization={memory}" in settings[name]
        assert f"max_episodes={episodes}" in settings[name]


async def test_a_process_that_ended_is_not_signalled_at_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weeks later another group of processes may have its number."""
    started: list[SimpleNamespace] = []
    restarts = 50

    async def start(_config: Config, name: str, *_: object) -> SimpleNamespace:
        code = 0 if len(started) == restarts else 1
        process = SimpleNamespace(wait=AsyncMock(), returncode=code)
        child = SimpleNamespace(
            name=name, process=process, signals=[], is_running=False
        )
        child.signal, child.stop = child.signals.append, AsyncMock()
        started.append(child)
        return child

    monkeypatch.setattr(run_processes, "start_in_run", start)
    config = small_config(run={"dir": str(tmp_path)})
    async with RunProcesses(config, OPEN, Placement()) as processes:
        monkeypatch.setattr(processes, "_may_restart", AsyncMock(return_value=True))
        processes.keep_rollout_server(0)
        await asyncio.gather(*processes._servers.values())
        assert processes._children == []
    assert len(started) == restarts + 1
    for child in started:
        assert child.signals == [signal.SIGKILL]
        child.stop.assert_not_called()


@pytest.mark.parametrize("is_extended", [False, True])
async def test_a_run_goes_on_without_a_second_server_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_extended: bool
) -> None:
    process = SimpleNamespace(wait=AsyncMock(), returncode=1)
    warned: list[str] = []

    async def start(_config: Config, name: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            process=process,
            signal=lambda _: None,
            describe_end=lambda: f"{name} has ended",
            stop=AsyncMock(),
        )

    monkeypatch.setattr(run_processes, "start_in_run", start)
    places = Placement(("0",), (("1",), ("0",)), is_extended=is_extended)
    stopped = AsyncMock()
    config = small_config(run={"dir": str(tmp_path)})
    async with RunProcesses(config, OPEN, places) as processes:
        monkeypatch.setattr(processes, "_may_restart", AsyncMock(return_value=False))
        monkeypatch.setattr(processes, "_stop_run", stopped)
        monkeypatch.setattr(processes, "warn", warned.append)
        for number in range(2):
            processes.keep_rollout_server(number)
        await asyncio.gather(*processes._servers.values())
    ended = (
        ["server-0 has ended"]
        if is_extended
        else ["server-0 has ended", "server-1 has ended"]
    )
    assert [call.args[0] for call in stopped.call_args_list] == ended
    goes_on = ["server-1 has ended; the run goes on without it"]
    assert warned == (goes_on if is_extended else [])


async def test_what_a_killed_server_has_left_is_removed_at_the_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "slipstream-sockets-abcdefgh"
    abandoned.mkdir(mode=0o700)
    folder = OwnedFolder("sockets")
    async with RunProcesses(config_of(tmp_path), OPEN, Placement()):
        pass
    assert not abandoned.exists()
    assert folder.path.exists()
    folder.close()


async def test_what_a_killed_command_has_left_is_removed_at_the_next_start(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "slipstream-sockets-abcdefgh"
    abandoned.mkdir(mode=0o700)
    async with RunProcesses(config_of(tmp_path), OPEN, Placement()):
        assert not abandoned.exists()


@contextlib.asynccontextmanager
async def with_controller(tmp_path: Path) -> AsyncIterator[RunProcesses]:
    """The processes of a run at a free port, for which a controller may start."""
    # The command reads it before the controller starts.
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = small_config(
        run={"dir": str(tmp_path), "id": "test-1"},
        controller={"address": f"127.0.0.1:{free_port('127.0.0.1')}"},
        model={"path": str(tmp_path)},
    )
    make_run_token(config)
    credentials = run_credentials(config)
    async with (
        asyncio.timeout(LIMIT_S),
        RunProcesses(config, credentials, Placement()) as processes,
    ):
        yield processes


async def run_with_a_deaf_controller(tmp_path: Path, processes: RunProcesses) -> int:
    """Starts a controller that listens at another address, and waits for its end."""
    path = tmp_path / "test" / "config.toml"
    address = tomllib.loads(path.read_text())["controller"]["address"]
    # Without its first line, which has the digest of the others.
    _, _, settings = path.read_text().partition("\n")
    path.write_text(settings.replace(address, f"127.0.0.1:{free_port('127.0.0.1')}"))
    processes.start_controller(num_servers=0)
    return await processes.wait()


@pytest.mark.process
async def test_one_signal_ends_a_run_whose_controller_gives_no_answer(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run_processes, "STOP_LIMIT_S", 0.5)
    async with with_controller(tmp_path) as processes:
        os.kill(os.getpid(), signal.SIGINT)
        assert (
            await run_with_a_deaf_controller(tmp_path, processes) == 128 + signal.SIGINT
        )
    out = capsys.readouterr().out
    ended = "! the controller does not answer, DEADLINE_EXCEEDED; the run is ended"
    assert f"{ended}; resume it with: {this_command()}\n" in out


@pytest.mark.process
async def test_a_controller_that_was_stopped_goes_on_and_ends_the_run_in_order(
    tmp_path, capsys
):
    async with with_controller(tmp_path) as processes:
        processes.start_controller(num_servers=0)
        running = asyncio.ensure_future(processes.wait())
        # The program hears of the stop in a call that is there: a later one might find no
        # controller.
        await until(lambda: processes._display.last_event)
        for child in processes._children:
            child.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 128 + signal.SIGINT
    out = capsys.readouterr().out
    assert "stopping: the user sent SIGINT" in out
    assert "does not answer" not in out


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_start_that_is_refused_changes_no_setting_of_the_run(
    tmp_path: Path, has_begun: bool
) -> None:
    earlier = small_config(run={"dir": str(tmp_path), "steps": 3})
    path = write_config(earlier, earlier.run_dir)
    content = path.read_bytes()
    config = small_config(run={"dir": str(tmp_path), "steps": 4})
    with pytest.raises(ConfigError):
        async with RunProcesses(config, OPEN, Placement()) as processes:
            assert path.read_bytes() != content
            processes._has_begun = has_begun
            raise ConfigError("the journal is of a newer release")
    assert (path.read_bytes() == content) is not has_begun


@pytest.mark.process
async def test_a_controller_that_stands_still_is_ended_and_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_LIMIT_S", "LOOK_S", "ALIVE_PERIOD_S"):
        monkeypatch.setattr(run_processes, name, 0.5)
    monkeypatch.setattr(run_processes, "SILENT_LIMIT_S", 3.0)
    async with with_controller(tmp_path) as processes:
        processes.start_controller(num_servers=0)
        running = asyncio.ensure_future(processes.wait())
        await until(lambda: processes._display.last_event)
        (hung,) = processes._children
        hung.signal(signal.SIGSTOP)
        await hung.process.wait()
        # The next one may be slow, on a busy machine.
        monkeypatch.setattr(run_processes, "SILENT_LIMIT_S", LIMIT_S)
        await until(lambda: processes._children and processes._children[0] is not hung)
        await until(lambda: processes._display.last_event)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 128 + signal.SIGINT
    out = capsys.readouterr().out
    assert "! the controller has given no answer for 3 s: it is ended\n" in out
    assert "controller was killed by SIGKILL" in out


@pytest.mark.process
async def test_a_controller_that_stands_still_while_the_run_is_stopped_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_LIMIT_S", "LOOK_S", "ALIVE_PERIOD_S"):
        monkeypatch.setattr(run_processes, name, 0.5)
    monkeypatch.setattr(run_processes, "SILENT_LIMIT_S", 3.0)
    async with with_controller(tmp_path) as processes:
        processes.start_controller(num_servers=0)
        running = asyncio.ensure_future(processes.wait())
        await until(lambda: processes._display.last_event)
        processes._display.show(status_pb2.Event(number=9, text="stopping: enough"))
        processes._children[0].signal(signal.SIGSTOP)
        with pytest.raises(
            RunFailed, match="no answer for 3 s while the run was stopped"
        ):
            await running


class Answers(RunCalls):
    """Calls that take the given seconds of a clock, with an answer or without one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, bool]
    ) -> None:
        super().__init__("127.0.0.1:1", OPEN)
        self._looks = list(looks)
        self._now_s = 0.0
        monkeypatch.setattr(
            patience, "time", SimpleNamespace(monotonic=lambda: self._now_s)
        )
        monkeypatch.setattr(asyncio, "sleep", self._pass)

    async def _pass(self, seconds: float) -> None:
        self._now_s += seconds

    async def answers(self) -> bool:
        if not self._looks:
            raise EOFError
        seconds, is_there = self._looks.pop(0)
        self._now_s += seconds
        return is_there

    @property
    def num_left(self) -> int:
        return len(self._looks)


async def test_a_controller_that_refuses_a_call_is_not_silent() -> None:
    async with at_an_address(Listening()) as address:
        # The controller of this test has no such method.
        assert await RunCalls(address, OPEN).answers()
    assert not await RunCalls(address, OPEN).answers()


async def test_a_controller_is_silent_after_a_minute_without_an_answer(
    monkeypatch,
) -> None:
    late = (5.0, False)
    # Nine times 7 seconds are more than a minute.
    calls = Answers(monkeypatch, (0.1, True), *[late] * 8, (0.1, True), *[late] * 10)
    await calls.until_silent(lambda: False)
    assert calls.num_left == 1


async def test_a_controller_that_reads_its_journal_is_not_silent(monkeypatch) -> None:
    calls = Answers(monkeypatch, *[(0.0, False)] * 1000)
    with pytest.raises(EOFError):
        await calls.until_silent(lambda: False)


async def test_a_machine_that_slept_has_no_silent_controller(monkeypatch) -> None:
    asleep = (3600.0, False)
    calls = Answers(monkeypatch, (0.1, True), *[asleep] * 8, (0.1, True))
    with pytest.raises(EOFError):
        await calls.until_silent(lambda: False)


@pytest.mark.process
async def test_a_cause_that_the_controller_could_not_be_told_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "STOP_LIMIT_S", 0.5)
    async with with_controller(tmp_path) as processes:
        running = asyncio.ensure_future(run_with_a_deaf_controller(tmp_path, processes))
        # The controller must have started before the executable goes missing.
        await until(lambda: (tmp_path / "test" / "logs" / "controller.log").exists())
        monkeypatch.setattr(sys, "executable", "/missing/python")
        processes.keep_rollout_server(0)
        with pytest.raises(
            RunFailed, match="rollout server server-0 cannot be started"
        ):
            await running


@pytest.mark.process
@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_signal_while_a_cause_waits_for_the_controller_does_not_hide_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_gone: bool,
) -> None:
    async with with_controller(tmp_path) as processes:
        running = asyncio.ensure_future(run_with_a_deaf_controller(tmp_path, processes))
        await until(lambda: (tmp_path / "test" / "logs" / "controller.log").exists())
        is_asked = asyncio.Event()

        async def stop(reason: str, *, failed: bool) -> str:
            if failed:
                is_asked.set()
                await until(lambda: processes._ended_controller)
            if failed and is_gone:
                await processes._children[0].process.wait()
            return "DEADLINE_EXCEEDED"

        monkeypatch.setattr(processes._calls, "stop", stop)
        monkeypatch.setattr(sys, "executable", "/missing/python")
        processes.keep_rollout_server(0)
        await is_asked.wait()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(
            RunFailed, match="rollout server server-0 cannot be started"
        ):
            await running
    assert capsys.readouterr().out.count("the controller does not answer") == 1


@pytest.mark.process
async def test_a_cause_that_was_told_is_not_followed_by_the_end_of_the_controllers_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor by a second line that only adds that the disk is full.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    text = "the run failed: trainer rank 0: CheckpointError: No space left on device"
    async with with_controller(tmp_path) as processes:
        processes._display.show(status_pb2.Event(number=1, text=text))
        running = asyncio.ensure_future(run_with_a_deaf_controller(tmp_path, processes))
        log = tmp_path / "test" / "logs" / "controller.log"
        await until(lambda: log.exists() and " listens" in log.read_text())
        # The process cannot write its last words either.
        for child in processes._children:
            child.signal(signal.SIGKILL)
        assert await running == 1
    err = capsys.readouterr().err
    assert err == f"slipstream: {text.removeprefix('the run failed: ')}\n"


@pytest.mark.process
async def test_a_controller_that_dies_while_the_run_is_stopped_is_not_started_again(
    tmp_path,
):
    """The next one would not know of the stop, and wait for the trainer that has left."""
    async with with_controller(tmp_path) as processes:
        processes._display.show(status_pb2.Event(number=1, text="stopping: enough"))
        running = asyncio.ensure_future(run_with_a_deaf_controller(tmp_path, processes))
        log = tmp_path / "test" / "logs" / "controller.log"
        await until(lambda: log.exists() and " listens" in log.read_text())
        for child in processes._children:
            child.signal(signal.SIGKILL)
        with pytest.raises(RunFailed, match="controller was killed by SIGKILL"):
            await running


@pytest.mark.parametrize("has_all", [True, False])
async def test_a_trainer_that_left_before_its_controller_died_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_all: bool
) -> None:
    monkeypatch.setattr(run_processes, "LOOK_S", 0.001)
    starts = 0
    stopped = []
    states = [status_pb2.RUN_STATE_STOPPING, None, status_pb2.RUN_STATE_STARTING]

    async def keep() -> None:
        """All ranks leave in order, once."""
        nonlocal starts
        starts += 1
        if starts == 2:
            await asyncio.Event().wait()

    async def look() -> status_pb2.RunStatus | None:
        assert starts == 1
        state = states.pop(0)
        return state and status_pb2.RunStatus(state=state)

    async def stop(reason: str, *, failed: bool) -> str:
        stopped.append((reason, failed))
        return ""

    config = small_config(run={"dir": str(tmp_path)}, learner={"world_size": 2})
    async with asyncio.timeout(LIMIT_S), RunProcesses(config, OPEN, Placement()) as run:
        run._own_ranks = range(2 if has_all else 1)
        monkeypatch.setattr(run, "keep_ranks", keep)
        monkeypatch.setattr(run._calls, "look", look)
        monkeypatch.setattr(run._calls, "stop", stop)
        watching = asyncio.ensure_future(run._watch_trainers())
        await until(lambda: starts == 2 or watching.done())
        assert (starts == 2) == has_all
        watching.cancel()
    # Ranks of other nodes have left too, and their commands are over.
    assert stopped == (
        [] if has_all else [("the trainer had left before its controller died", True)]
    )
    assert not states


class Stopping(Listening):
    """A run that saves and exports until `is_over` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Semaphore(0)
        self.is_over = False
        self.questions_after = 0

    async def GetStatus(  # noqa: N802
        self, request: status_pb2.GetStatusRequest, context: object
    ) -> status_pb2.RunStatus:
        self.asked.release()
        self.questions_after += self.is_over
        state = "RUN_STATE_FINISHED" if self.is_over else "RUN_STATE_STOPPING"
        return status_pb2.RunStatus(state=state)


async def test_a_node_that_must_leave_stops_the_run_and_leaves_ranks_their_time(
    monkeypatch,
):
    monkeypatch.setattr(run_processes, "GRACE_S", 0.02)
    monkeypatch.setattr(run_processes, "LOOK_S", 0.01)
    controller = Stopping()
    async with at_an_address(controller) as address, asyncio.timeout(LIMIT_S):
        ranks: asyncio.Future[Child | None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(end_in_order(ranks, RunCalls(address, OPEN)))
        request = await controller.stopped.get()
        for _ in range(3):
            await controller.asked.acquire()
        assert not waiting.done()
        controller.is_over = True
        await waiting
    assert (request.reason, request.failed) == ("a node of the learner leaves", False)
    # The ranks are still there: it looked for them twice more.
    assert (ranks.done(), controller.questions_after) == (False, 2)


@pytest.mark.parametrize(("code", "is_written"), [(1, True), (1, False), (-9, True)])
async def test_a_controller_whose_run_failed_before_anybody_heard_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_written: bool
) -> None:
    config = small_config(run={"dir": str(tmp_path)})
    if is_written:
        config.run_dir.mkdir()
        (config.run_dir / "summary.json").write_text('{"state": "failed", "steps": 0}')
    ended = SimpleNamespace(process=SimpleNamespace(wait=AsyncMock(), returncode=code))
    requests: list[object] = []

    async def may_restart(_: object, child: object) -> bool:
        requests.append(child)
        return False

    async with RunProcesses(config, OPEN, Placement()) as processes:
        processes._controller = asyncio.ensure_future(AsyncMock(return_value=ended)())
        monkeypatch.setattr(processes, "_watch_events", AsyncMock())
        monkeypatch.setattr(processes, "_may_restart", may_restart)
        assert await processes._keep_controller() is ended
        processes._controller = None
    assert requests == ([] if code == 1 and is_written else [ended])
