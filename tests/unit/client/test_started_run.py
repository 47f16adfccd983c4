"""The threads of a process that starts runs."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from slipstream.client import started_run
from slipstream.core.errors import EnvironmentFailed
from support.rigs.waiting import LIMIT_S

STARTS = """
import asyncio, os, sys
from slipstream.client import started_run
from slipstream.core.errors import EnvironmentFailed

started_run._submit(asyncio.sleep(0)).result()
child = os.fork()
if not child:
    started_run._submit(asyncio.sleep(0)).result(30)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_threads_that_start_their_first_runs_share_one_loop(monkeypatch) -> None:
    monkeypatch.setattr(started_run, "_loops", {})
    loops: list[asyncio.AbstractEventLoop] = []
    second = threading.Thread(target=lambda: loops.append(started_run._loop("one")))
    make = asyncio.new_event_loop

    def slow() -> asyncio.AbstractEventLoop:
        if second.ident is None:
            second.start()
            # The other thread must wait for this one, so that it does not end.
            second.join(0.5)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    loops.append(started_run._loop("one"))
    second.join()
    assert len({*loops}) == 1
    (running,) = (thread for thread in threading.enumerate() if thread.name == "one")
    loops[0].call_soon_threadsafe(loops[0].stop)
    running.join()
    loops[0].close()


def test_rows_come_behind_a_damaged_line_and_in_a_file_that_was_cut(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    run = started_run.Run.__new__(started_run.Run)
    run._plan, run._end, run._offset = SimpleNamespace(folder=tmp_path), Future(), 0
    looks = iter(
        [
            lambda: path.write_text('{"step": 1.0}\n{"step": \n{"step": 3.0}\n{"st'),
            # The text after a torn line is no row.
            lambda: path.write_text(
                '{"step": 1.0}\n{"step": \n{"step": 3.0}\n{"st{}\n'
            ),
            lambda: path.write_text('{"step": 5.0}\n'),
            path.unlink,
            lambda: path.write_text('{"step": 6.0}\n'),
            lambda: run._end.set_result(None),
        ]
    )
    monkeypatch.setattr(run, "_look", lambda: next(looks)())
    assert [row["step"] for row in run] == [1.0, 3.0, 5.0, 6.0]


@pytest.mark.process
def test_a_forked_process_starts_runs_of_its_own() -> None:
    program = (sys.executable, "-W", "ignore", "-c", STARTS)
    run = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert run.stdout == "7\n"


async def test_an_environment_that_the_run_suspends_is_told_and_the_others_are_served_on(
    capsys,
):
    served = []

    class Client:
        async def serve(self, environment: str, **options: object) -> None:
            if environment == "bad":
                raise EnvironmentFailed(0, "environment bad is suspended: it fails")
            await asyncio.sleep(0)
            served.append(environment)

    class Plan:
        address = (1, "127.0.0.1:1\n")
        served = [started_run._Served(name, name, {}) for name in ("bad", "good")]

        @asynccontextmanager
        async def client(self):
            yield Client()

    await started_run._serve_all(Plan(), (0, ""))
    assert served == ["good"]
    assert (
        capsys.readouterr().err
        == "slipstream: environment bad is suspended: it fails\n"
    )
