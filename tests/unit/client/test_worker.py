import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2
from support.fakes.fake_workers import LIMIT_S, WorkerServer, worker_process
from support.rigs.forked_programs import Forks

pytestmark = pytest.mark.process

FAKES = str(Path(__file__).parents[2] / "support" / "fakes")


# Checks fork where their imports are there already; workers start as servers start them.
CHECKS = Forks(
    "slipstream.client.worker",
    "slipstream.client.audit_report",
    "slipstream.client.environment",
    "slipstream.client.episode_host",
    entry="slipstream.client.worker:main",
)


async def check(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and last line of stderr of a check."""
    arguments_of_check = ("--check", *arguments)
    done = await asyncio.to_thread(
        CHECKS.run, arguments_of_check, limit_s=LIMIT_S, environ={"PATH": ""}
    )
    lines = done.stderr.splitlines()
    return done.returncode, done.stdout, lines[-1] if lines else ""


async def test_a_worker_runs_episodes_from_a_search_path_and_ends_with_its_stream(
    tmp_path,
):
    async with (
        WorkerServer(tmp_path) as server,
        worker_process("--connect", server.address) as process,
    ):
        worker = await server.attached()
        assert (
            await worker.load("fake_workers:Good", search_path=FAKES)
        ).loaded.num_tasks == 3
        assert worker.hello == pb.WorkerHello()
        answer = await worker.reset("a", task_index=1, seed=5)
        assert answer.observation.messages[0].content == "two 5"
        assert (await worker.step("a", "x")).verdict.reward == 0.25
        assert (await worker.call(ping=pb.PingCommand())).HasField("pong")
        worker.closed.set()
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0


async def test_what_an_environment_raises_or_prints_does_not_end_its_worker(
    tmp_path: Path,
) -> None:
    async with (
        WorkerServer(tmp_path) as server,
        worker_process("--connect", server.address) as process,
    ):
        worker = await server.attached()
        await worker.load("fake_workers:Misbehaving", search_path=FAKES)
        await worker.reset("a")
        for reply in ("exit", "interrupt", "cancel", "raise"):
            failure = (await worker.step("a", reply)).failure
            assert failure.kind == trajectory_pb2.FAILURE_KIND_ENVIRONMENT
        assert (await worker.step("a", "print")).verdict.reward == 1.0
        worker.closed.set()
        out, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert (process.returncode, out) == (0, b"")
        assert b"printed by the environment" in errors


LOSSY = """
import sys
from slipstream.client.worker import lossy_output
sys.stdout = sys.stderr = lossy_output()
for number in range(10_000):
    print("line", number)
"""


def test_a_full_disk_fails_no_environment_that_prints() -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-c", LOSSY], stderr=full, timeout=LIMIT_S
        )
    assert run.returncode == 0


async def test_a_worker_with_a_wrong_token_says_so(tmp_path: Path) -> None:
    async with (
        WorkerServer(tmp_path) as server,
        worker_process("--connect", server.address, token="w" * 32) as process,
        asyncio.timeout(LIMIT_S),
    ):
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert b"the token is missing or wrong" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
async def test_a_worker_does_not_outlive_the_process_that_started_it(
    tmp_path: Path,
) -> None:
    starter = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'slipstream.client.worker',"
        " '--connect', sys.argv[1]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    async with WorkerServer(tmp_path) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            starter,
            server.address,
            env={**os.environ, "SLIPSTREAM_TOKEN": "t" * 32},
            stdout=asyncio.subprocess.PIPE,
        )
        worker_pid = int(await process.stdout.readline())
        await server.attached()
        handle = os.pidfd_open(worker_pid)
        process.send_signal(signal.SIGKILL)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(handle, ended.set)
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        await process.communicate()


async def test_a_check_prints_the_number_of_tasks() -> None:
    echo = "slipstream.environments.echo:Echo"
    code, out, errors = await check(echo)
    ready, _, right, empty, *_ = out.splitlines()
    assert (code, errors) == (0, "")
    assert ready == f"environment {echo} is ready: 106 tasks, 100 of them played"
    assert right.split() == ["the", "right", "answer", "100", "1", "yes"]
    assert empty.split() == ["an", "empty", "reply", "100", "0", "yes"]


WAITS = """
import asyncio
from slipstream.client import Environment
class Waits(Environment):
    def tasks(self):
        return [1]
    async def reset(self, task):
        await asyncio.sleep(3600)
"""


async def test_a_check_is_not_disturbed_by_what_the_environment_prints() -> None:
    code, out, errors = await check("fake_workers:Plain", "--search-path", FAKES)
    ready = (
        "environment fake_workers:Plain is ready: tasks without end, 32 of them played"
    )
    assert (code, errors) == (0, r"half a character: \ud83d")
    assert out.splitlines()[0] == ready
    message = (
        "! an empty reply earned 1 in 32 of 32 tasks, no less than the other replies"
    )
    assert out.splitlines()[-1].startswith(message)


async def test_a_check_of_an_agent_waits_for_its_first_call() -> None:
    code, out, _ = await check("agents_for_checks:Calls", "--search-path", FAKES)
    ready = "is ready: 2 tasks, the first call is POST /v1/chat/completions\n"
    assert (code, out) == (0, f"environment agents_for_checks:Calls {ready}")


# A check that hangs waits for its limit: all of them run side by side.
HANGS = "no answer within 15 s (agents_for_checks.py:"
CAUSES = {
    "CallsNobody": "run() ended without a call to its endpoint",
    "Imports": "ModuleNotFoundError: No module named 'no_such_package' (agents_for_checks.py",
    **dict.fromkeys(("Waits", "Sleeps", "Blocks"), HANGS),
    "Alone": "of two episodes at once one fails, and a run plays many: ConnectionError: no",
}


async def test_a_failed_check_of_an_agent_says_why() -> None:
    async def checked(name: str, cause: str) -> None:
        limit = "15" if cause == HANGS else str(LIMIT_S)
        code, out, error = await check(
            name, "--search-path", FAKES, "--timeout-s", limit
        )
        assert (code, out) == (2, ""), name
        assert error.startswith(f"environment {name}: {cause}")

    await asyncio.gather(
        *(checked(f"agents_for_checks:{a}", c) for a, c in CAUSES.items())
    )


STEPS = """
import asyncio
from slipstream.client import Environment, Message, ResetResult, StepResult
class NoStep(Environment):
    def tasks(self):
        return [1]
    def reset(self, task):
        return [Message("user", "go on")]
class NaN(NoStep):
    def step(self, reply):
        return StepResult(float("nan"))
class Text(NoStep):
    def step(self, reply):
        return "well done"
class Hangs(NoStep):
    async def step(self, reply):
        await asyncio.sleep(3600)
class Picky(NoStep):
    def step(self, reply):
        return StepResult(float("nan") if reply == "ok" else 0.5)
class Given(NoStep):
    def reset(self, task):
        return ResetResult([Message("user", "go on")], reply="mine")
    def step(self, reply):
        return StepResult(float(reply == "mine"))
class Asks(NoStep):
    def step(self, reply):
        return StepResult(done=False, messages=[Message("user", "and?")])
"""
AWAITS = "no answer within 15 s (steps.py:17 in step)"
FAILED_STEPS = {
    "NoStep": "NotImplementedError: NoStep must define step()",
    "NaN": "the reward must be a finite number, got nan",
    "Text": "step() must return a StepResult, got 'well done'",
    "Hangs": AWAITS,
}


async def test_a_check_plays_a_step(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    options = ("--search-path", str(tmp_path), "--timeout-s", "15")
    ends = await asyncio.gather(
        *(check(f"steps:{name}", *options) for name in FAILED_STEPS)
    )
    # An empty reply and a word fail alike, which is one line.
    for (name, cause), (code, out, errors) in zip(
        FAILED_STEPS.items(), ends, strict=True
    ):
        number = "" if cause == AWAITS else " (in 2 plays)"
        assert (code, out, errors) == (
            2,
            "",
            f"environment steps:{name}: {cause}{number}",
        )
    code, out, errors = await check("steps:Picky", *options)
    assert (code, out) == (2, "")
    assert errors.startswith(f"environment steps:Picky: {FAILED_STEPS['NaN']}")
    code, out, _ = await check("steps:Given", *options)
    ready, _, last_line = out.splitlines()
    assert (code, ready) == (
        0,
        "environment steps:Given is ready: 1 task, 1 of them played",
    )
    assert last_line.split() == ["its", "own", "reply", "1", "1"]


async def test_a_check_tells_who_needs_more_than_one_reply(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    for name, folder, limit, cause in (
        ("steps:Asks", str(tmp_path), 0, ""),
        ("steps:Asks", str(tmp_path), 1, ""),
        (
            "agents_for_checks:Calls",
            FAKES,
            1,
            "with sampling.max_turns = 1 an agent's second call",
        ),
        ("agents_for_checks:Calls", FAKES, 0, ""),
        ("steps:Given", str(tmp_path), 0, ""),
    ):
        code, _, errors = await check(
            name, "--search-path", folder, "--limits", f'{{"max_turns": {limit}}}'
        )
        assert code == 0
        assert errors.startswith(f"slipstream: warning: {cause}") == bool(cause)
        assert bool(errors) == bool(cause)


FAILED_CHECKS = [
    (["no_such:X"], "environment no_such:X: there is no module 'no_such'"),
    (
        ["slipstream.environments.echo:Echo", "--args", '{"num_symbols": 1}'],
        "environment slipstream.environments.echo:Echo: num_symbols must be at least 3, got 1",
    ),
    (
        ["hangs:Hangs", "--timeout-s", "0.5"],
        "environment hangs:Hangs: no answer within 0.5 s",
    ),
    (
        ["waits:Waits", "--timeout-s", "15"],
        "environment waits:Waits: no answer within 15 s (waits.py:8 in reset)",
    ),
    (
        ["mistyped:X"],
        "environment mistyped:X: import of mistyped failed: "
        "SyntaxError: expected ':' (mistyped.py:2)",
    ),
    (
        ["broken:X"],
        "environment broken:X: import of broken failed: SystemExit: 4 (broken.py:1",
    ),
]


async def test_a_failed_check_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(3600)\n")
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "mistyped.py").write_text("class X:\n    def y(self) return 1\n")
    (tmp_path / "broken.py").write_text("raise SystemExit(4)\n")
    options = ("--search-path", str(tmp_path))
    ends = await asyncio.gather(
        *(check(*arguments, *options) for arguments, _ in FAILED_CHECKS)
    )
    for (_, cause), (code, out, error) in zip(FAILED_CHECKS, ends, strict=True):
        assert (code, out) == (2, "")
        assert error.startswith(cause)


FORKS = """
import os, sys
from slipstream.client import Environment, StepResult

def forked(leave):
    child = os.fork()
    if child == 0:
        leave()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

class Forks(Environment):
    def __init__(self):
        assert forked(lambda: sys.exit(7)) == 7

    def tasks(self):
        return ["a"]

    def reset(self, task):
        assert forked(lambda: 1 / 0) == 1
        return [{"role": "user", "content": task}]

    def step(self, reply):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        return StepResult(1.0)
"""


async def test_a_child_that_an_environment_has_forked_ends_where_it_comes_back(
    tmp_path,
) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    arguments = (
        "forks:Forks",
        "--search-path",
        str(tmp_path),
        "--timeout-s",
        "20",
        "--tell",
    )
    code, out, error = await check(*arguments)
    assert (code, error) == (0, "")
    assert out.startswith("environment forks:Forks is ready: 1 task")


async def test_importing_the_package_does_not_import_grpc_or_torch() -> None:
    program = (
        "import sys, slipstream.client\n"
        "assert not {'grpc', 'torch', 'numpy', 'pydantic'} & set(sys.modules), sys.modules\n"
        "assert slipstream.client.Client.__name__ == 'Client'\n"
        "assert 'torch' not in sys.modules\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
