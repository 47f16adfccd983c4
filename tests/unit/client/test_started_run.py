"""The threads of a process that starts runs."""

import asyncio
import subprocess
import sys
import threading

import pytest
from slipstream.client import started_run
from support.rigs.waiting import LIMIT_S

STARTS = """
import asyncio, os, sys
from slipstream.client import started_run

started_run._submit(asyncio.sleep(0)).result()
child = os.fork()
if not child:
    started_run._submit(asyncio.sleep(0)).result(30)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_threads_that_start_their_first_runs_share_one_loop(monkeypatch) -> None:
    monkeypatch.setattr(started_run, "_loops", {})
    found: list[asyncio.AbstractEventLoop] = []
    second = threading.Thread(target=lambda: found.append(started_run._loop("one")))
    make = asyncio.new_event_loop

    def slow() -> asyncio.AbstractEventLoop:
        if second.ident is None:
            second.start()
            # The other thread must wait for this one, so that it does not end.
            second.join(0.5)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    found.append(started_run._loop("one"))
    second.join()
    assert len({*found}) == 1
    (running,) = (each for each in threading.enumerate() if each.name == "one")
    found[0].call_soon_threadsafe(found[0].stop)
    running.join()
    found[0].close()


@pytest.mark.process
def test_a_forked_process_starts_runs_of_its_own() -> None:
    program = (sys.executable, "-W", "ignore", "-c", STARTS)
    run = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert run.stdout == "7\n"
