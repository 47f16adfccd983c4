"""What workers print is kept up to a limit."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from slipstream.rollout_server.episodes.worker_gateway import WorkerLogs
from slipstream.rollout_server.episodes.workers import EnvironmentWorker, Suspects
from slipstream.v1 import environment_pb2
from support.rigs.waiting import LIMIT_S

REMOVED = "slipstream: older lines were removed"


def run(logs: WorkerLogs, name: str, code: str) -> None:
    with logs.output(name) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=output, stderr=output
        )
    assert process.wait(LIMIT_S) == 0


@pytest.mark.process
def test_the_last_lines_are_kept_whole_and_the_file_says_that_others_are_gone(tmp_path):
    logs = WorkerLogs(tmp_path, 100_000)
    run(logs, "a.log", "for n in range(50_000): print('line', n)")
    run(logs, "b.log", "import os; os.write(1, b'one'); os.write(2, b' and the other')")
    logs.trim()
    first, *lines = (tmp_path / "a.log").read_text().splitlines()
    assert first == REMOVED
    assert lines == [f"line {number}" for number in range(50_000 - len(lines), 50_000)]
    assert len(lines) > 4_000
    assert (tmp_path / "a.log").stat().st_size <= 50_000 + len(REMOVED) + 1
    assert (tmp_path / "b.log").read_text() == "one and the other"


@pytest.mark.process
def test_a_log_goes_on_where_an_earlier_worker_left_it(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("an earlier worker was here\n")
    run(WorkerLogs(tmp_path, 1_000), "a.log", "print('a worker was here')")
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert lines == ["an earlier worker was here", "a worker was here"]


def test_a_line_longer_than_a_log_is_cut(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path, 1_000)
    with logs.output("a.log"):
        (tmp_path / "a.log").write_bytes(b"short\n" + b"x" * 5_000 + b"the end")
    logs.trim()
    assert (tmp_path / "a.log").read_text().endswith("xthe end")
    assert (tmp_path / "a.log").stat().st_size <= 500 + len(REMOVED) + 1


@pytest.mark.process
def test_a_worker_that_is_left_behind_writes_behind_what_was_kept(
    tmp_path: Path,
) -> None:
    logs = WorkerLogs(tmp_path, 1_000)
    with logs.output("a.log") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "print('x' * 5_000, flush=True); input(); print('last')",
            ],
            stdin=subprocess.PIPE,
            stdout=output,
        )
    while (tmp_path / "a.log").stat().st_size <= 5_000:
        assert process.poll() is None
    logs.trim()
    process.communicate(b"\n", LIMIT_S)
    assert (tmp_path / "a.log").read_text().endswith("x\nlast\n")


def test_a_log_that_was_removed_is_told_of_once(tmp_path, caplog):
    logs = WorkerLogs(tmp_path, 1_000)
    message = f"{tmp_path / 'a.log'} is not trimmed: No such file or directory"
    with logs.output("a.log"):
        (tmp_path / "a.log").unlink()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            logs.trim()
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.parametrize("begin", [0, len(REMOVED), 5_000])
async def test_the_last_words_of_a_worker_are_found_in_a_log_that_was_trimmed(
    tmp_path, begin
):
    message = f"{REMOVED}\nImportError: no numpy\n"
    (tmp_path / "a.log").write_text(message)
    spec = environment_pb2.EnvironmentSpec(name="e")
    worker = EnvironmentWorker(SimpleNamespace(), spec, Suspects(), try_reset=False)
    wait = AsyncMock(return_value="worker exited with code 1")
    worker._process = SimpleNamespace(
        wait=wait, calls=lambda: SimpleNamespace(running=())
    )
    worker._log = tmp_path / "a.log", begin
    await worker._watch_exit()
    assert str(worker.table.failure) == (
        "worker exited with code 1 before it attached: ImportError: no numpy"
    )
