"""Programs that tests fork are processes as others are: their streams, folder, session and end."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.rigs.forked_programs import Forks
from support.rigs.waiting import until

TELL = """
import json, os, sys
leads = os.getsid(0) == os.getpid()
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("MINE"), leads]), flush=True)
print("complaint", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks("json", entry="")
    yield made
    made.close()
    assert made.pid is None


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_program_has_arguments_folder_and_variables_of_its_own(forks, script, tmp_path) -> None:
    environ = dict(os.environ, MINE="only here")
    told = forks.run([script(TELL), "a", "b"], cwd=tmp_path, environ=environ, limit_s=60.0)
    assert json.loads(told.stdout) == [["a", "b"], str(tmp_path), "only here", False]
    assert (told.stderr, told.returncode) == ("complaint\n", 0)
    assert "MINE" not in os.environ


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_its_end_is_that_of_a_process(forks, script, text: str, code: int) -> None:
    assert forks.run([script(text)], limit_s=60.0).returncode == code


def test_what_it_registers_for_its_end_is_called(forks, script) -> None:
    text = "import atexit; atexit.register(print, 'at the end')"
    assert forks.run([script(text)], limit_s=60.0).stdout == "at the end\n"


def test_it_is_over_when_all_have_closed_its_output(forks, script) -> None:
    text = "import os, time\nif os.fork() == 0:\n    time.sleep(0.3)\n    print('late', flush=True)"
    assert forks.run([script(text)], limit_s=60.0).stdout == "late\n"


def test_a_program_that_hangs_is_killed_at_its_limit(forks, script) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run([script("import time; time.sleep(3600)")], limit_s=0.3)
    assert psutil.Process(forks.pid).children() == []
    # The process that forks answers again.
    assert forks.run([script("print(1)")], limit_s=60.0).stdout == "1\n"


def test_programs_run_side_by_side(forks, script, tmp_path) -> None:
    (tmp_path / "seen").mkdir()
    path = script(
        "import os, sys, time\n"
        "open('seen/' + sys.argv[1], 'w').close()\n"
        "while len(os.listdir('seen')) < 4: time.sleep(0.01)\n"
        "print(sys.argv[1])"
    )
    with ThreadPoolExecutor(4) as threads:
        runs = [
            threads.submit(forks.run, [path, str(n)], cwd=tmp_path, limit_s=60.0) for n in range(4)
        ]
    assert [run.result().stdout for run in runs] == [f"{n}\n" for n in range(4)]


async def test_a_started_program_leads_a_session_and_is_awaited(forks, script, tmp_path) -> None:
    text = TELL + "import signal; signal.pause()"
    with (tmp_path / "out").open("wb") as out:
        program = forks.start([script(text)], out=out.fileno(), err=out.fileno())
        assert program.returncode is None
        waits = [asyncio.ensure_future(program.wait()) for _ in range(2)]
        await until(lambda: (tmp_path / "out").read_text().endswith("complaint\n"))
        os.killpg(program.pid, signal.SIGTERM)
        async with asyncio.timeout(60.0):
            assert await asyncio.gather(*waits) == [-signal.SIGTERM] * 2
    assert program.returncode == -signal.SIGTERM
    told, complaint = (tmp_path / "out").read_text().splitlines()
    assert (json.loads(told)[-1], complaint) == (True, "complaint")
