"""How the end of a process is told."""

import asyncio
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream.client.launch.children import (
    Child,
    first_failed,
    last_complaint,
    show_lines,
    start_child,
    with_full_disk,
)
from slipstream.core.errors import ConfigError
from slipstream.core.machine.process import kernel_oom_kills
from slipstream.extensions.logs.lines import as_objects
from support.rigs.waiting import LIMIT_S, until

RAISE_TWO = """
raise ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("x"), ValueError("no way")])
"""


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


ABOVE = "RuntimeError: Engine core initialization failed. See root cause above."
LOST = "[W1 TCPStore.cpp:1] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3): got 0 bytes."
FRAMES = (
    "Exception raised from recvBytes at Utils.hpp:787 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f0e in libc10.so)",
    "<omitting python frames>",
    "frame #19: __libc_start_main + 0x85 (0x7f0e in libc.so.6)",
    "",
)
NCCL = (
    LOST,
    *FRAMES,
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  NCCL error: remote process exited",
    "Last error:",
    *FRAMES,
)
WENT_WELL = ("2026-01-01 INFO x: joined run r", "rank 0 INFO y: version 3")
NEWER = "2026-01-01 12:00:01 rank 0 ERROR x: the disk is gone"
REFUSED = (
    "2026-01-01 12:00:00 rank 0 ERROR x: rank 0 failed",
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in step',
    "    torch._foreach_add_(denominators, eps)",
    "TypeError: _foreach_add_() received an invalid combination - got (tuple, str)",
    " * (tuple of Tensors self, Number scalar)",
    " * (tuple of Tensors self, tuple of Tensors other, *, Number alpha = 1)",
    "",
)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (("Traceback", "  File", "ValueError: no way", ""), "ValueError: no way"),
        # Our own line goes before the noise after it.
        (("slipstream: no way", "destroyed while pending"), "no way"),
        (WENT_WELL, ""),
        ((*REFUSED, NEWER), NEWER),
        # A line that sends the reader to one above.
        (
            ("torch.OutOfMemoryError: 3 GiB", "Traceback", "  x()", ABOVE),
            "torch.OutOfMemoryError: 3 GiB",
        ),
        # Frames of a program in another language.
        (("noise", LOST, *FRAMES), LOST),
        (NCCL, "NCCL error: remote process exited"),
        # A place in a traceback.
        (
            ("OSError: full", '[rank0]:   File "/a/b', "[rank0]:    ^^^^~~^^"),
            "OSError: full",
        ),
    ],
)
def test_the_line_that_names_the_cause_is_found(lines, cause, form, tmp_path):
    if form == "json":
        lines = as_objects(lines, "server-0", "run", time.time)
    assert last_complaint(write(tmp_path / "log", *lines)) == cause


def test_an_earlier_life_is_not_the_cause_of_this_end(tmp_path: Path) -> None:
    assert last_complaint(tmp_path / "none") == ""
    log = write(tmp_path / "log", "slipstream: first")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("RuntimeError: second\n")
    assert last_complaint(log, start) == "RuntimeError: second"


def test_the_cause_is_found_in_a_log_that_was_cut_since_the_start(
    tmp_path: Path,
) -> None:
    # logrotate cuts it so, with copytruncate.
    log = write(tmp_path / "log", *["an earlier line"] * 100)
    start = log.stat().st_size
    write(log, "RuntimeError: here")
    assert last_complaint(log, start) == "RuntimeError: here"


@pytest.mark.parametrize(
    "prefix", ["", "[rank0]: ", "(EngineCore pid=7) ERROR 11-21 [core.py:1] "]
)
def test_the_exception_is_the_cause_and_not_the_end_of_its_text(prefix, tmp_path):
    first, *traceback = REFUSED
    lines = [first, *(f"{prefix}{line}" for line in traceback)]
    noise = "2026-01-01 12:00:01 rank 0 WARNING x: the failure could not be reported: UNAVAILABLE"
    log = write(tmp_path / "log", *lines, noise)
    assert last_complaint(log).startswith("TypeError: _foreach_add_() received")


@pytest.mark.process
async def test_the_end_of_several_errors_at_once_is_one_of_them(tmp_path: Path) -> None:
    child = await start_script(tmp_path, "two", RAISE_TWO)
    assert await child.process.wait() == 1
    message = f"two exited with code 1: ValueError: no way (log: {child.log_path})"
    assert child.describe_end() == message


# Begins a log again before its last line.
MOVES = """
import pathlib, sys
log = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    with log.open("a") as file:
        file.write(line)
    if "move" in line:
        log.rename(log.with_suffix(".1"))
"""


@pytest.mark.process
async def test_the_cause_is_found_in_the_log_that_another_program_writes(
    tmp_path: Path,
) -> None:
    """The writer has all of it though it is the last to end; what was before was moved away."""
    log = write(tmp_path / "two.log", *["an earlier line"] * 100)
    (tmp_path / "two.py").write_text(f"print('move', flush=True)\n{RAISE_TWO}")
    child = await start_child(
        "two",
        "two",
        [],
        log_path=log,
        environ={"PYTHONPATH": str(tmp_path)},
        log_writer=[sys.executable, "-c", MOVES, str(log)],
    )
    assert await child.process.wait() == 1
    assert (
        child.describe_end()
        == f"two exited with code 1: ValueError: no way (log: {log})"
    )
    assert log.with_suffix(".1").read_text().endswith("move\n")
    await child.stop(LIMIT_S)
    assert child.log_end is not None and not child.log_end.is_alive()


@pytest.mark.process
async def test_what_a_killed_process_has_said_is_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import time\nprint('said', flush=True)\ntime.sleep(1000)\n"
    )
    child = await start_child(
        "two",
        "two",
        [],
        log_path=tmp_path / "log",
        environ={"PYTHONPATH": str(tmp_path)},
        log_writer=["sh", "-c", 'cat > "$0"', str(tmp_path / "copy")],
    )
    copy = tmp_path / "copy"
    # The end of the line is a write of its own where Python buffers nothing.
    await until(lambda: copy.exists() and "\n" in copy.read_text())
    child.signal(signal.SIGKILL)
    await child.stop(LIMIT_S)
    assert copy.read_text() == "said\n"


async def start_script(folder: Path, name: str, text: str) -> Child:
    (folder / f"{name}.py").write_text(text)
    environ = {"PYTHONPATH": str(folder)}
    return await start_child(
        name, name, [], log_path=folder / f"{name}.log", environ=environ
    )


async def ended(folder: Path, code: int, *lines: str) -> Child:
    """A process that has ended with this code and log."""
    process = await asyncio.create_subprocess_exec("sh", "-c", f"exit {code}")
    await process.wait()
    log = write(folder / "log", *lines)
    return Child("server-0", process, log, oom_kills=kernel_oom_kills())


@pytest.mark.process
async def test_whoever_fails_first_is_the_cause_though_others_wait_for_it(
    tmp_path: Path,
) -> None:
    waiting = await start_script(tmp_path, "waiting", "import time\ntime.sleep(600)\n")
    done = await start_script(tmp_path, "done", "raise SystemExit(1)\n")
    failing = await start_script(tmp_path, "failing", "raise SystemExit(3)\n")
    assert await first_failed([waiting, done, failing], fine=(0, 1)) is failing
    assert waiting.is_running
    for other in (waiting, done):
        await other.stop(0.0)


@pytest.mark.process
async def test_a_process_that_was_stopped_ends_when_it_is_asked_to(
    tmp_path: Path,
) -> None:
    # Linux ends a stopped process that has no handler.
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    text += "print('waits', flush=True)\ntime.sleep(600)\n"
    child = await start_script(tmp_path, "stopped", text)
    await until(lambda: "waits" in child.log_path.read_text())
    child.signal(signal.SIGSTOP)
    await asyncio.wait_for(child.stop(600.0), LIMIT_S)
    assert child.process.returncode == 7


@pytest.mark.process
async def test_a_killed_process_is_not_blamed_for_what_it_said_last(
    tmp_path: Path,
) -> None:
    text = "import time\nprint('busy', flush=True)\ntime.sleep(60)\n"
    child = await start_script(tmp_path, "busy", text)
    child.signal(signal.SIGKILL)
    await child.process.wait()
    assert child.describe_end() == f"busy was killed by SIGKILL (log: {child.log_path})"
    # The kernel seems to have ended a process since the start.
    child.oom_kills -= 1
    assert child.describe_end() == (
        "busy was killed by SIGKILL: memory was full, so the kernel ended a process; "
        f"give the run more memory (log: {child.log_path})"
    )


@pytest.mark.process
async def test_a_full_gpu_is_told_with_the_settings_that_help(tmp_path: Path) -> None:
    torchs = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    child = await ended(
        tmp_path, 1, "Traceback (most recent call last):", "  x()", torchs
    )
    message = (
        r"exited with code 1: the GPU's memory is full: lower "
        r"learner\.micro_batch_tokens.*: torch"
    )
    assert re.search(message, child.describe_end())
    assert torchs in child.describe_end()


@pytest.mark.process
async def test_an_engine_that_is_killed_at_its_start_is_told_as_that(
    tmp_path: Path,
) -> None:
    # No line above names a cause: a process that a signal ends cannot write one.
    child = await ended(
        tmp_path, 4, "noise", "Traceback (most recent call last):", "  x()", ABOVE
    )
    log = child.log_path
    assert child.describe_end() == (
        "server-0 exited with code 4: vLLM's engine ended at its start: by an error above in the "
        f"log, or by a signal (log: {log})"
    )
    # The kernel seems to have ended a process since the start.
    child.oom_kills -= 1
    assert child.describe_end() == (
        "server-0 exited with code 4: memory was full, so the kernel ended a process; give the "
        f"run more memory (log: {log})"
    )


async def test_lines_of_a_growing_log_are_shown_once_and_whole(tmp_path, capsys):
    log = write(tmp_path / "log", "version 1", "noise")
    ended = asyncio.Event()
    show = asyncio.create_task(show_lines(log, "version ", ended))
    shown = ""
    async with asyncio.timeout(LIMIT_S):
        while not shown:
            await asyncio.sleep(0.01)
            shown = capsys.readouterr().out
    assert shown == "version 1\n"
    with log.open("a") as file:
        file.write("version 2\nversi")
        file.flush()
        file.write("on 3\n")
    ended.set()
    await show
    assert capsys.readouterr().out == "version 2\nversion 3\n"


def test_a_full_disk_is_told_beside_a_cause_that_could_not_be_written(
    tmp_path, monkeypatch
):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert with_full_disk("it ended", folder) == "it ended"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    message = with_full_disk("it ended", tmp_path)
    assert message == f"it ended; no space is left on the disk of {tmp_path}"
    assert (
        with_full_disk(f"the run ends: {message}", tmp_path)
        == f"the run ends: {message}"
    )


@pytest.mark.parametrize("spoil", ["a file for its folder", "a folder for the log"])
async def test_a_log_that_cannot_be_written_is_one_line(
    tmp_path: Path, spoil: str
) -> None:
    path = tmp_path / "logs" / "controller.log"
    if spoil == "a file for its folder":
        path.parent.touch()
    else:
        path.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"controller\.log cannot be written: "
    ) as caught:
        await start_child("controller", "this", [], log_path=path)
    assert "\n" not in str(caught.value)
