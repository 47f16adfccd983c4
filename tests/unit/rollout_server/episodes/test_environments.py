"""Environment workers as real processes."""

import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import psutil
import pytest
from slipstream.core.errors import EnvironmentFailed
from slipstream.core.machine.warm_start import WarmParent
from slipstream.protocol.access.tokens import TOKEN_KEY
from slipstream.rollout_server.chat import ChatMessage, chat_messages
from slipstream.rollout_server.episodes import workers
from slipstream.rollout_server.episodes.calls import StreamSession
from slipstream.rollout_server.episodes.environments import (
    ClientEnvironments,
    Environments,
)
from slipstream.rollout_server.episodes.worker_gateway import (
    NO_LIMITS,
    WorkerGateway,
    WorkerLimits,
    WorkerStream,
)
from slipstream.v1 import environment_pb2 as env_pb
from slipstream.v1 import environment_pb2_grpc, fleet_pb2, trajectory_pb2
from support.rigs import forked_programs
from support.rigs.other_pythons import bare_python, furnished_python
from support.rigs.waiting import LIMIT_S, until

pytestmark = pytest.mark.process


class NoClients:
    async def run(self) -> None:
        await asyncio.Event().wait()


class Hosted:
    """Environments of this test, and what was reported of them."""

    def __init__(self, environments: Environments, reports: asyncio.Queue) -> None:
        self.environments = environments
        self._reports = reports

    def load(
        self,
        name,
        *,
        timeout_s=LIMIT_S,
        num_workers=1,
        try_reset=False,
        python="",
        **args,
    ):
        spec = env_pb.EnvironmentSpec(
            name=name,
            reference=f"odd_environments:{name}",
            args_json=json.dumps(args),
            timeout_s=timeout_s,
            num_workers=num_workers,
            search_path=str(Path(__file__).parent),
            python=python,
        )
        self.environments.order(
            fleet_pb2.EnvironmentOrder(spec=spec, try_reset=try_reset)
        )

    def unload(self, name: str) -> None:
        spec = env_pb.EnvironmentSpec(name=name)
        self.environments.order(fleet_pb2.EnvironmentOrder(spec=spec, unload=True))

    async def loaded(self, name, **options) -> fleet_pb2.EnvironmentReport:
        self.load(name, **options)
        return await self.report()

    async def report(self) -> fleet_pb2.EnvironmentReport:
        return await asyncio.wait_for(self._reports.get(), LIMIT_S)

    async def open(
        self, name: str, key: str = "episode", task: int = 0, timeout_s=LIMIT_S
    ):
        return await self.environments.open(name, key, task, timeout_s)

    async def begun(
        self, name: str, key: str = "episode", task: int = 0, timeout_s=LIMIT_S
    ):
        session = await self.open(name, key, task, timeout_s)
        await session.reset(task, 0)
        return session


@contextlib.asynccontextmanager
async def hosting(tmp_path, *, limits=NO_LIMITS):
    reports: asyncio.Queue[fleet_pb2.EnvironmentReport] = asyncio.Queue()
    gateway = WorkerGateway(tmp_path / "logs", log_bytes=4096, limits=limits)
    async with gateway, asyncio.TaskGroup() as group:
        environments = Environments(group, gateway, NoClients(), reports.put_nowait)
        yield Hosted(environments, reports)
        environments.close()
    assert not worker_processes()


@pytest.fixture
async def hosted(tmp_path: Path) -> AsyncIterator[Hosted]:
    async with hosting(tmp_path) as hosted_environment:
        yield hosted_environment


@pytest.fixture
async def impatient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Hosted]:
    """Workers that are ended when they do not answer a ping at once."""
    monkeypatch.setattr(workers, "PING_S", 0.5)
    async with hosting(tmp_path) as hosted_environment:
        yield hosted_environment


def child_processes(argument: str) -> list[psutil.Process]:
    """Those of the product with an argument: a process that forks for other tests names modules."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if argument in command and forked_programs.__file__ not in command:
                found.append(child)
    return found


def worker_processes() -> list[psutil.Process]:
    return child_processes("slipstream.client.worker")


async def test_an_episode_runs_in_a_worker(hosted) -> None:
    report = await hosted.loaded("Good")
    assert (report.environment, report.num_tasks) == ("Good", 5)
    assert not report.HasField("failure")
    session = await hosted.open("Good")
    assert chat_messages(await session.reset(1, 2)) == (ChatMessage("user", "a b"),)
    verdict = await session.step("x", truncated=False)
    assert (verdict.reward, verdict.done) == (0.5, True)
    session.close()


async def test_an_episode_runs_with_another_interpreter(hosted, tmp_path: Path) -> None:
    python = furnished_python(tmp_path / "venv")
    report = await hosted.loaded("Good", python=str(python))
    assert not report.HasField("failure"), report.failure.message
    assert [worker.cmdline()[0] for worker in child_processes("--connect")][-1] == str(
        python
    )
    session = await hosted.open("Good")
    assert chat_messages(await session.reset(1, 2)) == (ChatMessage("user", "a b"),)
    session.close()


async def test_an_interpreter_that_cannot_run_a_worker_is_named(
    hosted, tmp_path
) -> None:
    bare = bare_python(tmp_path / "venv")
    loud = tmp_path / "loud"
    loud.write_text(f"#!/bin/sh\necho; echo {'x' * 9000}; exit 3\n")
    removing = tmp_path / "removing"
    removing.write_text(f"#!/bin/sh\necho lost; rm {tmp_path}/logs/*.log; exit 3\n")
    for program in (loud, removing):
        program.chmod(0o755)
    causes = {
        bare: f"code 2 before it attached: {bare} lacks what a worker needs: {bare} -m pip install",
        tmp_path
        / "none": f"127 before it attached: slipstream: {tmp_path}/none: No such file or",
        loud: f"worker exited with code 3 before it attached: {'x' * 400}",
        removing: "worker exited with code 3 before it attached: without a word",
    }
    for python, cause in causes.items():
        hosted.load("Good", python=str(python))
        message = (await hosted.report()).failure.message
        assert cause in message
        assert len(message) <= 500


async def test_the_last_lines_that_a_worker_printed_are_kept(tmp_path: Path) -> None:
    async with hosting(tmp_path) as hosted:
        await hosted.loaded("Loud")
        session = await hosted.begun("Loud")
        for number in range(30):
            await session.step(f"reply {number}", truncated=False)
    log = tmp_path / "logs" / "rollout-server-environment-Loud-0.log"
    assert log.read_text().splitlines()[-1] == "line 49 of reply 29"
    assert log.stat().st_size <= 4096


async def test_the_same_order_again_only_repeats_the_report(hosted) -> None:
    first = await hosted.loaded("Good")
    hosted.load("Good")
    assert await hosted.report() == first


async def test_an_environment_that_cannot_be_loaded_is_reported(hosted) -> None:
    report = await hosted.loaded("Unloadable")
    assert report.failure.kind == trajectory_pb2.FAILURE_KIND_ENVIRONMENT
    assert "the data set is missing" in report.failure.message
    with pytest.raises(EnvironmentFailed, match="the data set is missing"):
        await hosted.open("Unloadable")


async def test_a_worker_that_dies_while_loading_is_reported(hosted) -> None:
    report = await hosted.loaded("DiesWhileLoading")
    assert report.failure.message == "worker was killed by SIGKILL"


async def test_a_worker_that_is_killed_while_loading_is_started_once_more(
    hosted, tmp_path
):
    report = await hosted.loaded("DiesAtFirst", mark=str(tmp_path / "mark"))
    assert not report.HasField("failure"), report.failure.message
    session = await hosted.open("DiesAtFirst")
    assert chat_messages(await session.reset(1, 2)) == (ChatMessage("user", "a b"),)
    session.close()


async def test_a_call_without_an_answer_times_out_and_the_worker_stays(hosted) -> None:
    await hosted.loaded("Hanging")
    session = await hosted.begun("Hanging", timeout_s=2.0)
    with pytest.raises(
        EnvironmentFailed,
        match="no answer to step within 2 s, the environment's timeout_s "
        r"\(odd_environments.py:\d+ in step\)$",
    ) as caught:
        await session.step("x", truncated=False)
    assert caught.value.kind == trajectory_pb2.FAILURE_KIND_TIMEOUT
    session.close()
    (await hosted.begun("Hanging", "other")).close()


@pytest.mark.parametrize("alone", [False, True])
async def test_a_worker_that_does_not_answer_a_ping_is_replaced(
    impatient, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    await impatient.loaded("Stuck")
    if alone:
        monkeypatch.setattr(workers, "PING_S", math.inf)
        impatient.environments._hosted["Stuck"][0]._suspects.lost([0], in_call=[0])
    stuck = await impatient.open("Stuck", timeout_s=0.2)
    with pytest.raises(
        EnvironmentFailed,
        match=r"no answer to reset within 0.2 s, .* \(odd_environments.py:\d+ in reset\)$",
    ) as caught:
        await stuck.reset(0, 0)
    assert caught.value.kind == trajectory_pb2.FAILURE_KIND_TIMEOUT
    stuck.close()
    (await impatient.begun("Stuck", "other", 1)).close()


async def test_who_waits_behind_a_hanging_episode_is_not_blamed(impatient) -> None:
    await impatient.loaded("Stuck")
    stuck = await impatient.open("Stuck", "stuck", 0, timeout_s=0.2)
    behind = await impatient.open("Stuck", "behind", 1, timeout_s=0.2)
    idle = await impatient.begun("Stuck", "idle", 2)
    failures = await asyncio.gather(
        stuck.reset(0, 0), behind.reset(1, 0), return_exceptions=True
    )
    assert [failure.kind for failure in failures] == [
        trajectory_pb2.FAILURE_KIND_TIMEOUT,
        trajectory_pb2.FAILURE_KIND_BYSTANDER,
    ]
    with pytest.raises(
        EnvironmentFailed, match=r"odd_environments.py:\d+ in reset\); 3 ep"
    ) as raised:
        await idle.step("x", truncated=False)
    assert raised.value.kind == trajectory_pb2.FAILURE_KIND_BYSTANDER
    for session in (stuck, behind, idle):
        session.close()


async def test_who_shares_a_worker_with_a_call_that_blocks_it_goes_elsewhere_after_an_end(
    hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.3)
    await hosted.loaded("Stuck", timeout_s=1.0)
    environment = hosted.environments._hosted["Stuck"][0]
    environment._suspects.most_together = 4
    stuck = await hosted.open("Stuck", "stuck", 0)
    beside = await hosted.begun("Stuck", "beside", 1)
    blocking = asyncio.create_task(stuck.reset(0, 0))
    with pytest.raises(
        EnvironmentFailed,
        match=r"^another episode holds up its worker \(odd_environments.py:\d+ in reset\)$",
    ) as raised:
        while True:
            await beside.step("x", truncated=False)
    assert raised.value.kind == trajectory_pb2.FAILURE_KIND_BYSTANDER
    beside.close()
    elsewhere = await hosted.begun("Stuck", "elsewhere", 1)
    assert elsewhere._table is not stuck._table
    # The call itself has its whole limit, and its worker is left to it.
    assert not blocking.done()
    assert not stuck._table.failure
    blocking.cancel()
    for session in (stuck, elsewhere):
        session.close()


@pytest.mark.long
async def test_a_task_that_was_in_a_call_when_its_worker_ended_runs_alone_until_it_passes(
    hosted,
):
    await hosted.loaded("Exiting")
    dying = await hosted.begun("Exiting", "a")
    bystander = await hosted.begun("Exiting", "b", 1)
    for session in (dying, bystander):
        with pytest.raises(
            EnvironmentFailed, match="worker exited with code 7; 2 ep"
        ) as caught:
            await session.step("x", truncated=False)
        assert caught.value.kind == trajectory_pb2.FAILURE_KIND_BYSTANDER
        session.close()
    beside = await hosted.begun("Exiting", "c", 1)
    # The task is a suspect; one that passes is none any more.
    alone = await hosted.open("Exiting", "d", 0)
    assert alone._table is not beside._table
    await alone.reset(1, 0)
    await alone.step("x", truncated=False)
    alone.close()
    shared = await hosted.open("Exiting", "f", 0)
    sharing = hosted.environments._hosted["Exiting"][0]._ready
    assert shared._table in [worker.table for worker in sharing]
    shared.close()
    beside.close()


@pytest.mark.long
async def test_a_suspect_that_ends_a_worker_of_its_own_is_set_aside_and_harms_no_other(
    hosted,
):
    alone = await suspected(hosted)
    beside = await hosted.begun("Exiting", "b", 1)
    await alone.reset(0, 0)
    cause = "worker exited with code 7"
    with pytest.raises(EnvironmentFailed, match=f"^{cause}$") as caught:
        await alone.step("x", truncated=False)
    assert caught.value.kind == trajectory_pb2.FAILURE_KIND_ENVIRONMENT
    alone.close()
    assert (await beside.step("x", truncated=False)).reward == 0.5
    beside.close()
    with pytest.raises(
        EnvironmentFailed, match=f"^{cause}; its task ended a worker in which"
    ):
        await hosted.open("Exiting", "c", 0)


def forking_processes() -> list[psutil.Process]:
    """Those that fork workers, without the forks, which have their command lines."""
    return [
        process
        for process in child_processes("--forks")
        if process.ppid() == os.getpid()
    ]


async def test_workers_that_follow_others_are_forked_with_limits_and_causes_of_their_own(
    tmp_path: Path,
) -> None:
    async with hosting(
        tmp_path, limits=WorkerLimits(memory_bytes=400 << 20, lone_workers=2)
    ) as hosted:
        await hosted.loaded("Greedy")
        assert not forking_processes()
        suspects = hosted.environments._hosted["Greedy"][0]._suspects
        suspects.lost([0, 1], in_call=[0, 1])
        greedy = await hosted.begun("Greedy", "greedy", 0)
        killed = await hosted.begun("Greedy", "killed", 1)
        (parent,) = forking_processes()
        keepers = parent.children()
        assert len(keepers) == 2
        causes = r"^worker was ended: out of memory: it took 0\.\d+ GiB, more than rollout_server"
        with pytest.raises(EnvironmentFailed, match=causes):
            await greedy.step("x", truncated=False)
        newest = max(keepers, key=psutil.Process.create_time)
        (worker,) = newest.children()
        worker.kill()
        with pytest.raises(EnvironmentFailed, match=r"^worker was killed by SIGKILL$"):
            await killed.step("x", truncated=False)
        greedy.close()
        killed.close()


async def test_a_process_that_forks_workers_is_started_again_where_it_was_killed(
    hosted,
) -> None:
    first = await suspected(hosted)
    (parent,) = forking_processes()
    parent.kill()
    # The worker may begin the episode before the signal reaches it.
    failure = "episode a is open already"
    while failure == "episode a is open already":
        try:
            await first.reset(1, 0)
        except EnvironmentFailed as error:
            failure = str(error)
    assert "worker was killed by SIGKILL" in failure
    first.close()
    hosted.environments._hosted["Exiting"][0]._suspects.lost([2], in_call=[2])
    second = await hosted.begun("Exiting", "b", 2)
    (other,) = forking_processes()
    assert other != parent
    second.close()


async def test_a_worker_is_started_by_itself_where_nothing_can_fork_it(
    hosted, caplog: pytest.LogCaptureFixture
) -> None:
    await hosted.loaded("Exiting")
    exiting = hosted.environments._hosted["Exiting"][0]
    exiting._gateway._warm_parents[""] = WarmParent([sys.executable, "-c", "pass"], {})
    exiting._suspects.lost([0], in_call=[0])
    session = await hosted.begun("Exiting", "a", 0)
    assert not forking_processes()
    assert caplog.messages == [
        "environment Exiting: the process that forks workers has ended, or does not answer"
    ]
    session.close()


@pytest.mark.parametrize("is_other", [False, True])
async def test_forked_workers_draw_other_numbers_and_see_no_secrets_and_no_sockets(
    hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_other: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    python = str(furnished_python(tmp_path)) if is_other else ""
    await hosted.loaded("Drawing", python=python)
    hosted.environments._hosted["Drawing"][0]._suspects.lost([0, 1], in_call=[0, 1])
    words = []
    for task in (2, 0, 1):
        session = await hosted.open("Drawing", f"episode {task}", task)
        (message,) = (await session.reset(task, 0)).messages
        words.append(json.loads(message.content))
        session.close()
    unforked, first, second = words
    for name, number in first["numbers"].items():
        assert number != second["numbers"][name]
    for name in ("sockets", "module", "product"):
        assert first[name] == second[name] == unforked[name]
    assert first["secrets"] == []


async def suspected(hosted: Hosted) -> StreamSession:
    """A session of a task that runs alone."""
    await hosted.loaded("Exiting")
    hosted.environments._hosted["Exiting"][0]._suspects.lost([0], in_call=[0])
    return await hosted.open("Exiting", "a", 0)


@pytest.mark.long
async def test_an_episode_that_leaves_while_it_waits_for_a_worker_of_its_own_holds_up_nobody(
    hosted,
) -> None:
    first = await suspected(hosted)
    leaving = asyncio.create_task(hosted.open("Exiting", "b", 0))
    waiting = asyncio.create_task(hosted.open("Exiting", "c", 0))
    done, _ = await asyncio.wait([leaving, waiting], timeout=0.1)
    assert not done
    leaving.cancel()
    first.close()
    async with asyncio.timeout(LIMIT_S):
        (await waiting).close()


@pytest.mark.long
async def test_episodes_that_wait_for_a_worker_of_their_own_are_told_of_an_unload(
    hosted,
) -> None:
    first = await suspected(hosted)
    waiting = [asyncio.create_task(hosted.open("Exiting", name, 0)) for name in "bcd"]
    # All begin to wait.
    await asyncio.sleep(0)
    hosted.unload("Exiting")
    errors = await asyncio.wait_for(
        asyncio.gather(*waiting, return_exceptions=True), LIMIT_S
    )
    assert [str(error) for error in errors] == ["the environment was unloaded"] * 3
    first.close()


async def test_a_worker_that_takes_too_much_memory_is_ended_with_the_cause(
    tmp_path: Path,
) -> None:
    async with hosting(tmp_path, limits=WorkerLimits(memory_bytes=400 << 20)) as hosted:
        await hosted.loaded("Greedy")
        session = await hosted.begun("Greedy")
        with pytest.raises(
            EnvironmentFailed,
            match=r"worker was ended: out of memory: it took 0\.\d+ GiB, more than "
            r"rollout_server.environment_memory_gib = 0.39 \(odd_environments.py:\d+ in step\)",
        ):
            await session.step("x", truncated=False)
        session.close()


async def test_an_environment_whose_reset_hangs_is_refused_when_it_is_tried(
    impatient,
) -> None:
    report = await impatient.loaded("Stuck", timeout_s=0.2, try_reset=True)
    assert report.failure.message.startswith("no answer to reset within 0.2 s")
    assert report.failure.message.endswith("in reset)")
    assert (await impatient.loaded("Good", try_reset=True)).num_tasks == 5


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (
            "LacksAPackage",
            "ModuleNotFoundError: No module named 'no_such_package' (odd_env",
        ),
        ("CallsNobody", "run() ended without a call to its endpoint"),
        (
            "NeverCalls",
            "the agent did not call the model within 1 s, the environment's timeout_s",
        ),
    ],
)
async def test_an_agent_that_does_not_call_the_model_is_refused_when_it_is_tried(
    hosted, name: str, cause: str
) -> None:
    limit_s = 1.0 if name == "NeverCalls" else LIMIT_S
    report = await hosted.loaded(name, timeout_s=limit_s, try_reset=True)
    assert report.failure.message.startswith(cause)
    assert (await hosted.loaded("CallsTheModel", try_reset=True)).num_tasks == 3


HOSTING = """
import asyncio, sys
from pathlib import Path
from slipstream.rollout_server.episodes.environments import Environments
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway, WorkerStream
from slipstream.v1 import environment_pb2, fleet_pb2

class NoClients:
    async def run(self):
        await asyncio.Event().wait()

async def main(logs, modules):
    loaded = asyncio.Event()
    gateway = WorkerGateway(Path(logs), log_bytes=4096)
    async with gateway, asyncio.TaskGroup() as group:
        environments = Environments(group, gateway, NoClients(), lambda _: loaded.set())
        spec = environment_pb2.EnvironmentSpec(
            name="Scattering", reference="odd_environments:Scattering", timeout_s=60,
            search_path=modules,
        )
        environments.order(fleet_pb2.EnvironmentOrder(spec=spec))
        await loaded.wait()
        session = await environments.open("Scattering", "episode", 0, 60.0)
        print((await session.reset(0, 0)).messages[0].content, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_an_environment_forks_ends_with_a_server_that_is_killed(
    tmp_path: Path,
) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOSTING,
        str(tmp_path / "logs"),
        str(Path(__file__).parent),
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pids = [int(pid) for pid in (await server.stdout.readline()).split()]
    below = psutil.Process(server.pid).children(recursive=True)
    assert {process.pid for process in below} >= set(pids)
    server.kill()
    await server.wait()
    await until_gone([process.pid for process in below])


async def test_episodes_are_spread_over_the_workers(hosted) -> None:
    await hosted.loaded("Good", num_workers=2)
    first = await hosted.open("Good", "a")
    await until(
        lambda: len(hosted.environments._hosted["Good"][0]._ready) >= 2, LIMIT_S
    )
    second = await hosted.open("Good", "b")
    assert first._table is not second._table
    first.close()
    second.close()


async def test_unloading_ends_the_workers(hosted) -> None:
    await hosted.loaded("Good")
    session = await hosted.open("Good")
    hosted.unload("Good")
    await until(lambda: not worker_processes(), LIMIT_S)
    with pytest.raises(EnvironmentFailed):
        await session.reset(0, 0)


async def scattered(session) -> list[int]:
    """The processes that an episode of `Scattering` has left behind."""
    (message,) = (await session.reset(0, 0)).messages
    pids = [int(pid) for pid in message.content.split()]
    assert all(map(psutil.pid_exists, pids))
    return pids


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def until_gone(pids: list[int]) -> None:
    await until(lambda: not any(map(is_alive, pids)), LIMIT_S)


async def test_what_an_environment_forks_ends_with_its_worker(hosted) -> None:
    await hosted.loaded("Scattering")
    session = await hosted.open("Scattering")
    pids = await scattered(session)
    with pytest.raises(EnvironmentFailed, match="worker exited with code 0"):
        await session.step("x", truncated=False)
    await until_gone(pids)
    session.close()
    again = await hosted.open("Scattering", "again", 1)
    pids = await scattered(again)
    again.close()
    hosted.unload("Scattering")
    await until_gone(pids)


def late(_: str) -> tuple[str, ...]:
    """A worker that never attaches."""
    return sys.executable, "-c", "import time; time.sleep(600)"


async def test_unloading_ends_a_worker_that_did_not_attach_yet_and_who_waits_for_it(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "worker_program", late)
    async with hosting(tmp_path) as hosted:
        hosted.load("Good")
        waiting = [asyncio.create_task(hosted.open("Good", name)) for name in "ab"]
        await until(lambda: child_processes("--connect"), LIMIT_S)
        hosted.unload("Good")
        errors = await asyncio.wait_for(
            asyncio.gather(*waiting, return_exceptions=True), LIMIT_S
        )
    assert [str(error) for error in errors] == ["the environment was unloaded"] * 2
    assert not child_processes("--connect")


async def test_a_worker_that_does_not_attach_in_time_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "worker_program", late)
    async with hosting(tmp_path, limits=WorkerLimits(start_s=0.2)) as hosted:
        report = await hosted.loaded("Good")
        assert report.failure.message == "worker did not attach within 0.2 s"
        assert not child_processes("--connect")


async def test_a_worker_whose_log_cannot_be_written_names_the_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "rollout-server-environment-Good-0.log"
    log.mkdir(parents=True)
    async with hosting(tmp_path) as hosted:
        report = await hosted.loaded("Good")
    assert (
        report.failure.message == f"no worker could be started: {log}: Is a directory"
    )


async def test_a_worker_that_cannot_be_started_is_reported_and_ends_nothing_else(
    hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "executable", "/missing/python")
        report = await hosted.loaded("Good")
    cause = "/missing/python: No such file or directory"
    assert report.failure.message == f"no worker could be started: {cause}"
    assert not (await hosted.loaded("Curious")).HasField("failure")


async def test_a_worker_has_neither_files_nor_secrets_of_its_server(
    hosted, tmp_path, monkeypatch
):
    for name in ("WANDB_API_KEY", "AWS_SECRET", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret-of-the-server")
    with (tmp_path / "token").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        await hosted.loaded("Curious")
        session = await hosted.open("Curious")
        (message,) = (await session.reset(0, 0)).messages
        session.close()
    files, variables, arguments = json.loads(message.content)
    # The null device, its log, the record of its calls, and what it has opened itself: sockets,
    # pipes, an event loop, its listing.
    allowed_paths = (
        "/dev/null",
        "socket:",
        "anon_inode:",
        "pipe:",
        "/proc/",
        "/memfd:calls",
    )
    allowed_paths += (
        str(tmp_path / "logs" / "rollout-server-environment-Curious-0.log"),
    )
    assert [path for path in files.values() if not path.startswith(allowed_paths)] == []
    names = {
        "PATH",
        "HOME",
        "LANG",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "LC_CTYPE",
        "DOCKER_HOST",
    }
    names |= {"HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"}
    fixed = {"PYTHONHASHSEED": "0", "GRPC_ENABLE_FORK_SUPPORT": "false"}
    assert set(variables) <= names | fixed.keys()
    assert {name: variables[name] for name in fixed} == fixed
    # The process's token is gone when the environment is loaded, and was never an argument.
    assert arguments[1::2] == ["--connect", "--record"]
    assert len(arguments) == 5


async def test_calls_to_clients_end_though_their_stream_fails_at_that_moment() -> None:
    is_read = asyncio.Event()

    class FailingCall:
        """A stream that fails at the moment in which its reader is cancelled."""

        async def __aiter__(self) -> AsyncIterator[fleet_pb2.EnvironmentAnswer]:
            is_read.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), None
            )
            yield

        def cancel(self) -> None:
            pass

    channel = SimpleNamespace(
        stream_stream=lambda *_, **__: lambda *_, **__: FailingCall()
    )
    clients = ClientEnvironments(channel, ())
    running = asyncio.create_task(clients.run())
    clients.open("served", "episode", 1.0)
    await is_read.wait()
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=LIMIT_S)
    running.cancel()
    assert done == {running}


async def test_a_worker_may_not_compress_what_it_says(tmp_path: Path) -> None:
    """A small message could become one of any size."""

    async def requests():
        yield env_pb.WorkerMessage(hello=env_pb.WorkerHello())
        await asyncio.Event().wait()

    async with WorkerGateway(tmp_path, log_bytes=4096) as gateway:
        stream = WorkerStream()
        gateway.expect(stream)
        async with grpc.aio.insecure_channel(
            gateway.address, compression=grpc.Compression.Gzip
        ) as channel:
            attach = environment_pb2_grpc.WorkerServiceStub(channel).Attach
            attached = attach(
                requests(), metadata=((TOKEN_KEY, f"Bearer {stream.token}"),)
            )
            ended = asyncio.ensure_future(attached.code())
            waiting = asyncio.ensure_future(stream.attached.wait())
            await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        assert not stream.attached.is_set()


async def test_a_command_to_a_worker_that_is_gone_fails_no_call(tmp_path: Path) -> None:
    """gRPC would log such a failure with two tracebacks."""
    gateway = WorkerGateway(tmp_path, log_bytes=4096)
    stream = WorkerStream()
    wrote = asyncio.Event()
    gateway.expect(stream)

    class Gone:
        def invocation_metadata(self):
            return ((TOKEN_KEY, f"Bearer {stream.token}"),)

        async def write(self, command: env_pb.WorkerCommand) -> None:
            wrote.set()
            raise grpc.aio.InternalError("the operation failed")

    async def requests():
        yield env_pb.WorkerMessage(hello=env_pb.WorkerHello())
        await wrote.wait()

    attached = asyncio.ensure_future(gateway.Attach(requests(), Gone()))
    stream.table.notify(env_pb.WorkerCommand())
    await asyncio.wait_for(attached, LIMIT_S)
    assert stream.over.is_set()
