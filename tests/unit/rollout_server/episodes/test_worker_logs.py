"""What workers print is kept up to a limit."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.core.errors import RunFailed
from slipstream.rollout_server.episodes.worker_gateway import BoundedLog, WorkerLogs
from support.fakes.failing_thread import end_writing
from support.rigs.waiting import LIMIT_S


def kept(path: Path) -> tuple[list[str], list[str]]:
    """The lines of the file before and of the newest file."""
    before = path.with_name(f"{path.name}.1")
    return before.read_text().splitlines(), path.read_text().splitlines()


@pytest.mark.parametrize("lines_at_once", [1, 3, 500])
def test_the_last_lines_are_kept_whole_and_the_files_say_that_others_are_gone(
    lines_at_once: int, tmp_path: Path
) -> None:
    log = BoundedLog(tmp_path / "a.log", 4000)
    lines = [f"line {number}" for number in range(2000)]
    for at in range(0, len(lines), lines_at_once):
        log.write("".join(f"{line}\n" for line in lines[at : at + lines_at_once]).encode())
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 2000
    older, newer = kept(log.path)
    assert newer[0] == (
        "slipstream: the lines before these are in a.log.1, older ones were removed: "
        "4000 bytes are kept"
    )
    found = older[1:] + newer[1:]
    assert len(found) >= (2000 - len(newer[0]) - 1) // len("line 1999\n")
    assert found == lines[-len(found) :]


def test_a_log_goes_on_where_an_earlier_worker_left_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for number in range(100):
        log = BoundedLog(path, 2000)
        log.write(f"worker {number:03} was here\n".encode())
        log.close()
    older, newer = kept(path)
    assert newer[-1] == "worker 099 was here"
    assert path.stat().st_size <= 1000
    assert len(older) > 20


def test_a_line_longer_than_a_file_is_cut(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", 1000)
    log.write(b"short\n" + b"x" * 5000 + b"the end\n")
    log.close()
    assert log.path.read_text().endswith("xthe end\n")
    assert all(path.stat().st_size <= 500 for path in tmp_path.iterdir())


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[WorkerLogs]:
    yield WorkerLogs(tmp_path, 100_000)


@pytest.fixture
def hanging_disk(tmp_path: Path) -> Iterator[Path]:
    """A file that takes what a pipe holds, and then nothing, for as long as the test runs."""
    path = tmp_path / "hanging.log"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(end)


def run(logs: WorkerLogs, name: str, code: str) -> None:
    with logs.output(name) as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    assert process.wait(LIMIT_S) == 0


@pytest.mark.process
def test_all_that_was_printed_before_the_end_is_in_the_file(logs, tmp_path):
    run(logs, "a.log", "for n in range(50_000): print('line', n)")
    run(logs, "b.log", "import os; os.write(1, b'one'); os.write(2, b' and the other')")
    logs.close()
    older, newer = kept(tmp_path / "a.log")
    assert newer[-1] == "line 49999"
    assert sum(path.stat().st_size for path in tmp_path.glob("a.log*")) <= 100_000
    # A busy machine may fill the newest file in one piece; then no line is left in the older one.
    first = next(line for line in (*older, *newer) if line.startswith("line "))
    assert int(first.split()[1]) < 49_999 - 2000
    assert (tmp_path / "b.log").read_text() == "one and the other"


@pytest.mark.process
def test_what_a_worker_leaves_behind_does_not_keep_its_server(logs, tmp_path):
    with logs.output("a.log") as output:
        left = subprocess.Popen(["yes"], stdout=output)
    try:
        logs.close()
        assert left.wait(LIMIT_S) != 0
    finally:
        left.kill()
        left.wait()


@pytest.mark.process
def test_a_worker_does_not_wait_for_a_disk_that_is_full(logs, tmp_path, caplog):
    (tmp_path / "a.log").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        run(logs, "a.log", "print('x' * 1_000_000)")
        logs.close()
    (record,) = caplog.records
    assert "a.log: No space left on device; what is printed is lost" in record.getMessage()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_end_of_the_thread_that_writes_is_noticed(logs: WorkerLogs) -> None:
    watch = asyncio.create_task(logs.watch())
    end_writing(logs)
    with pytest.raises(RunFailed, match="the output of environment workers is not logged any more"):
        await asyncio.wait_for(watch, LIMIT_S)
    logs.close()


@pytest.mark.process
def test_a_disk_that_hangs_does_not_keep_the_server(hanging_disk, tmp_path, caplog):
    logs = WorkerLogs(tmp_path, 10 << 20, close_limit_s=0.2)
    with logs.output(hanging_disk.name) as output:
        worker = subprocess.Popen(["head", "-c", "100000", "/dev/zero"], stdout=output)
    assert worker.wait(LIMIT_S) == 0
    closing = threading.Thread(target=logs.close, daemon=True)
    with caplog.at_level(logging.WARNING):
        closing.start()
        closing.join(LIMIT_S)
    assert not closing.is_alive()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: what environment workers printed last was not written within 0.2 s"
    )
