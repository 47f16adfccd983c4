"""Requests of a process to the system and to its interpreter."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.core.machine.process import (
    Descendant,
    below_this,
    resident_bytes,
    send_signal,
    shared_out_bytes,
    without_collections,
)
from support.rigs.waiting import LIMIT_S

# Starts the command of its arguments, which waits for the end of this process, and ends.
PARENT = """
import os, subprocess, sys
from slipstream.core.machine.process import below_this
wait = 'while kill -0 "$0" 2>/dev/null; do sleep 0.01; done; exec "$@"'
command = ["sh", "-c", wait, str(os.getpid()), *below_this(), *sys.argv[2:]]
subprocess.Popen(command, pass_fds=[int(sys.argv[1])])
os._exit(0)
"""


@pytest.mark.process
def test_a_process_that_has_ended_takes_no_memory() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for measured in (resident_bytes, shared_out_bytes):
        assert measured(Descendant(ended.pid, 0)) == 0
        assert measured(Descendant(os.getpid(), 0)) > 1 << 20


def test_objects_made_without_collections_stay_and_the_collector_is_as_before() -> None:
    frozen = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            objects = [[] for _ in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(objects)


def test_the_collector_is_on_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.process
def test_a_program_begins_and_its_exit_code_is_that_of_the_command() -> None:
    assert subprocess.run([*below_this(), "sh", "-c", "exit 7"]).returncode == 7


@pytest.mark.process
def test_a_program_whose_parent_ended_before_it_began_does_not_begin(
    tmp_path: Path,
) -> None:
    """A run that is killed while it starts its processes leaves none of them."""
    reader, writer = os.pipe()
    words = [str(writer), "touch", str(tmp_path / "began")]
    subprocess.run(
        [sys.executable, "-c", PARENT, *words], pass_fds=[writer], check=True
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as ended:
        # The end of the command closes its writing end.
        assert ended.read() == b""
    assert not (tmp_path / "began").exists()


@pytest.mark.process
async def test_a_signal_leaves_the_exit_code_to_the_loop_that_waits_for_it(monkeypatch):
    def take_the_code(_: subprocess.Popen[bytes]) -> None:
        pytest.fail("the process was asked for its exit code")

    monkeypatch.setattr(subprocess.Popen, "poll", take_the_code)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    send_signal(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    # The process has ended: there is nobody to be signalled.
    send_signal(process, signal.SIGTERM)


LEAVE = """
import atexit, sys
from slipstream.core.machine.process import leave
class Late:
    def __del__(self):
        print("taken apart")
sys.late = Late()
atexit.register(print, "left")
print("written")
leave(3)
"""


@pytest.mark.process
def test_a_program_that_leaves_calls_its_exit_functions_and_takes_nothing_apart() -> (
    None
):
    run = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (run.returncode, run.stdout, run.stderr) == (3, "written\nleft\n", "")


@pytest.mark.process
def test_a_full_disk_of_the_log_changes_no_exit_code(tmp_path: Path) -> None:
    full = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    program = LEAVE.replace("leave(3)", f"{full}leave(3)")
    with (tmp_path / "log").open("w") as log:
        run = subprocess.run(
            [sys.executable, "-c", program], stdout=log, timeout=LIMIT_S
        )
    assert run.returncode == 3


ROOT = Path(__file__).parents[4]
# Programs whose processes have native threads at their end: of torch's groups, vLLM, tokenizers or
# trackers.
THREADED = (
    "extensions/slipstream/extensions/rollouts/export_rollouts.py",
    "extensions/slipstream/extensions/trackers/export_metrics.py",
    "learner/slipstream/learner/trainer/__main__.py",
    "learner/slipstream/learner/trainer/bisect.py",
    "learner/slipstream/learner/trainer/replay.py",
    "learner/slipstream/learner/trainer/export_checkpoint.py",
    "rollout_server/slipstream/rollout_server/__main__.py",
)


def test_every_program_that_may_open_groups_leaves_without_finalising() -> None:
    """The abort of a native thread hits one end in ten on a busy machine, so the text is read."""
    programs = [
        path
        for top in ("learner", "rollout_server", "extensions")
        for path in sorted((ROOT / top).rglob("*.py"))
        if 'if __name__ == "__main__":' in (text := path.read_text())
        and ("open_policy(" in text or "    leave(main())" in text)
    ]
    assert {str(path.relative_to(ROOT)) for path in programs} == set(THREADED)
    for path in programs:
        assert path.read_text().endswith(
            'if __name__ == "__main__":\n    leave(main())\n'
        ), path
