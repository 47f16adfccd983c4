"""Workers that run tests side by side: each test once, whatever becomes of a worker."""

import re
import sys
from pathlib import Path

import pytest
from support.rigs.completed import completed

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
FIRST = """
import os, signal, sys, warnings
import pytest
def test_passes(tmp_path, capsys):
    print("seen")
    assert capsys.readouterr().out.split() == ["seen"]
    warnings.warn("watch out")
def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
def test_behind_it():
    pass
"""
SECOND = """
import pytest
@pytest.fixture(scope="module")
def shared():
    yield
    raise ValueError("in the teardown")
@pytest.mark.skip("not here")
def test_is_skipped(): pass
def test_fails():
    print("said")
    assert 1 == 2
def test_with_a_fixture(shared): pass
"""


def run(folder: Path, *flags: str) -> str:
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND)
    (folder / "conftest.py").write_text(
        "from support.rigs.forked_workers import pytest_addoption, pytest_runtestloop\n"
    )
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--workers", "2", "-p", "no:cacheprovider"]
    return completed([*command, *flags, str(folder)], cwd=folder).stdout


def test_each_test_is_run_once_and_told_as_without_workers(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert re.search(r"2 failed, 3 passed, 1 skipped, 1 warning, 1 error in", shown), shown
    assert "the process that ran it ended with code -9" in shown
    for told in ("assert 1 == 2", "said", "ValueError: in the teardown", "watch out"):
        assert told in shown


def test_a_failure_ends_all_workers_if_it_shall(tmp_path: Path) -> None:
    assert "!!! stopping after " in run(tmp_path, "--exitfirst")
