"""Processes that a fork server starts: like those of `python -m`, but the imports are made once."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from slipstream.client.launch import forks
from slipstream.client.launch.children import Child
from slipstream.client.launch.forks import ForkServer
from support.rigs.waiting import until

pytestmark = pytest.mark.process

PRELOAD = """
import pathlib
def preload(arguments):
    print("imports print")
    with open(arguments[0], "a") as file:
        file.write("imported\\n")
"""
# Says what it is, then ends as the log's folder has it: by a code, or not before it is killed.
PROGRAM = """
import json, os, pathlib, subprocess, sys, time
import setproctitle
def words():
    return pathlib.Path("/proc/self/cmdline").read_text().rstrip("\\0 ").replace("\\0", " ")
what = {
    "argv": sys.argv[1:], "name": __name__, "words": words(), "environ": os.environ.get("RANK"),
    "comm": pathlib.Path("/proc/self/comm").read_text().strip(),
    "leads": os.getsid(0) == os.getpid(), "parent": os.getppid(), "stdin": sys.stdin.read(),
}
if sys.argv[2] == "leave":
    what["left"] = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
setproctitle.setproctitle("ENGINE")
what["title"] = words()
print(json.dumps(what), flush=True)
if sys.argv[2].isdecimal():
    sys.exit(int(sys.argv[2]))
time.sleep(600)
"""


class Toy:
    """A program with a fork server; its log and its file of imports."""

    def __init__(self, folder: Path, end: str, *, preload: str = PRELOAD) -> None:
        package = folder / "toy"
        package.mkdir()
        for name, text in (("__init__", ""), ("preload", preload), ("__main__", PROGRAM)):
            (package / f"{name}.py").write_text(text)
        self.log, self.imports = folder / "log", folder / "imports"
        self.server = ForkServer("toy", [str(self.imports), end])
        self.environ = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

    async def start(self, name: str = "toy-1") -> Child:
        return await self.server.start(name, log_path=self.log, environ=self.environ)

    def said(self) -> list[dict]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def says(self, count: int = 1) -> dict:
        """What the process says that is the `count`th to do so."""
        await until(lambda: len(self.said()) >= count)
        return self.said()[count - 1]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_each_process_is_like_one_of_python_m_and_the_imports_are_made_once(tmp_path):
    toy = Toy(tmp_path, "7")
    for number in (1, 2):
        toy.environ["RANK"] = str(number)
        child = await toy.start(f"toy-{number}")
        assert await child.process.wait() == 7
        assert child.process.returncode == 7
        said = await toy.says(number)
        assert said["words"] == f"{sys.executable} -m toy {toy.imports} 7"
        # So does vLLM name its engine.
        assert said["title"] == "ENGINE"
        assert (said["argv"], said["name"]) == ([str(toy.imports), "7"], "__main__")
        assert (said["comm"], said["environ"]) == (f"toy-{number}", str(number))
        assert (said["leads"], said["stdin"]) == (True, "")
    assert toy.imports.read_text() == "imported\n"
    await toy.server.close()


async def test_a_signal_reaches_a_process_from_its_start_on(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "stay")
    for _ in range(3):
        child = await toy.start()
        child.signal(signal.SIGTERM)
        assert await child.process.wait() == -signal.SIGTERM
        assert "was killed by SIGTERM" in child.describe_end()
    await toy.server.close()


async def test_processes_end_with_their_server_and_the_next_one_has_a_new_server(tmp_path):
    toy = Toy(tmp_path, "stay")
    children = [await toy.start(f"toy-{number}") for number in (1, 2)]
    server = (await toy.says(2))["parent"]
    os.kill(server, signal.SIGKILL)
    for child in children:
        assert await child.process.wait() == -signal.SIGKILL
        await until(lambda pid=child.process.pid: not is_there(pid))
    child = await toy.start()
    assert (await toy.says(3))["parent"] not in (server, os.getpid())
    assert toy.imports.read_text() == "imported\n" * 2
    await toy.server.close()
    await until(lambda: not is_there(child.process.pid))
    assert await child.process.wait() == -signal.SIGKILL


async def test_what_a_dead_process_has_left_ends_before_the_next_one_starts(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "leave")
    child = await toy.start()
    left = (await toy.says())["left"]
    child.signal(signal.SIGKILL)
    await child.process.wait()
    assert is_there(left)
    await toy.start()
    assert not is_there(left)
    os.kill((await toy.says(2))["left"], signal.SIGKILL)
    await toy.server.close()


@pytest.mark.parametrize(
    "preload", ["raise ImportError('no such library')", "", "import os; os._exit(0)"]
)
async def test_a_program_that_cannot_be_imported_before_starts_plainly(preload, tmp_path):
    toy = Toy(tmp_path, "7", preload=preload)
    for number in (1, 2):
        child = await toy.start()
        assert await child.process.wait() == 7
        assert (await toy.says(number))["parent"] == os.getpid()
    log = toy.log.read_text()
    assert log.count("toy-1 starts without a fork server") == 1
    assert ("ImportError: no such library" in log) == ("raise" in preload)
    # The cause of an end is looked for behind the server's own words.
    assert "library" not in child.describe_end()


async def test_a_server_that_was_stopped_is_ended_and_the_process_starts_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "ANSWER_LIMIT_S", 0.1)
    toy = Toy(tmp_path, "7")
    await (await toy.start()).process.wait()
    server = (await toy.says())["parent"]
    os.kill(server, signal.SIGSTOP)
    assert await (await toy.start()).process.wait() == 7
    assert (await toy.says(2))["parent"] == os.getpid()
    assert not is_there(server)
    # The next one has a server again.
    assert await (await toy.start()).process.wait() == 7
    assert (await toy.says(3))["parent"] not in (server, os.getpid())
    await toy.server.close()


async def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "stay")
    script = tmp_path / "command.py"
    script.write_text(
        "import asyncio, os, pathlib, sys\n"
        "from slipstream.client.launch.forks import ForkServer\n"
        "async def main():\n"
        "    server = ForkServer('toy', sys.argv[1:])\n"
        "    await server.start('toy-1', log_path=pathlib.Path(sys.argv[3]), environ=os.environ)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, str(script), str(toy.imports), "stay", str(toy.log)]
    command = await asyncio.create_subprocess_exec(*words, env={**os.environ, **toy.environ})
    server = (await toy.says())["parent"]
    command.kill()
    await command.wait()
    await until(lambda: not is_there(server))


async def test_the_end_of_a_process_is_seen_though_all_tasks_were_cancelled(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "stay")
    child = await toy.start()
    # So does asyncio at a second Ctrl-C, before the block of the run's processes ends them.
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await child.stop(5.0)
    assert child.process.returncode == -signal.SIGTERM
    await toy.server.close()


async def test_on_a_machine_with_gpus_processes_start_plainly(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "uses_gpus", lambda: True)
    toy = Toy(tmp_path, "stay")
    child = await toy.start()
    assert (await toy.says())["parent"] == os.getpid()
    await child.stop(0.0)


async def test_the_end_of_an_earlier_process_is_no_answer_to_an_order() -> None:
    server = forks._Server()
    loop = asyncio.get_running_loop()
    server.next = loop.create_future()
    server.pipe_data_received(1, b'{"pid": 1}\n')
    first = await server.next
    server.next = loop.create_future()
    server.pipe_data_received(1, b'{"pid": 1, "code": 3}\n')
    assert first.returncode == 3
    assert not server.next.done()
    # A process that ends before it has told its number is an answer too.
    server.pipe_data_received(1, b'{"pid": 2, "code": 4}\n')
    second = await server.next
    assert (second.pid, second.returncode) == (2, 4)
