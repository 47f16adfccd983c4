"""Which processes may fill a GPU's memory at the same time."""

import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.machine import gpus
from slipstream.core.machine.gpus import Gpu, fill_gpus, gpu_names
from support.rigs.waiting import LIMIT_S

GPUS = tuple(Gpu(n, f"GPU-{n}aaa", "gpu", 1 << 30) for n in range(3))


def may_fill(folder: Path, *gpus: str, alone: bool) -> bool:
    try:
        with fill_gpus(folder, gpus, alone=alone, limit_s=0.0):
            return True
    except RunFailed:
        return False


def test_an_engine_starts_beside_nobody(tmp_path: Path) -> None:
    with fill_gpus(tmp_path, ["a", "b"], alone=True, limit_s=1.0):
        assert not may_fill(tmp_path, "b", alone=False)
        assert not may_fill(tmp_path, "a", alone=True)
        assert may_fill(tmp_path, "c", alone=True)
    assert may_fill(tmp_path, "a", "b", alone=True)


def test_ranks_load_beside_each_other_and_beside_no_engine(tmp_path: Path) -> None:
    with fill_gpus(tmp_path, ["a"], alone=False, limit_s=1.0):
        assert may_fill(tmp_path, "a", alone=False)
        assert not may_fill(tmp_path, "a", "b", alone=True)
        # The one that could not have all of them holds none.
        assert may_fill(tmp_path, "b", alone=True)


def test_wait_has_a_limit_that_is_said(tmp_path: Path) -> None:
    with (
        fill_gpus(tmp_path, ["a"], alone=True, limit_s=1.0),
        pytest.raises(RunFailed, match=r"on GPU a within 0\.2 s"),
        fill_gpus(tmp_path, ["a"], alone=False, limit_s=0.2),
    ):
        pytest.fail("it had its turn")


def started(program: str, folder: Path, *, until: str) -> subprocess.Popen[str]:
    """The program that is to say a line; it has said it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{until}\n"
    return process


@pytest.mark.process
def test_turn_ends_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from slipstream.core.machine.gpus import fill_gpus\n"
        "with fill_gpus(pathlib.Path(sys.argv[1]), ['a'], alone=True, limit_s=1):\n"
        "    child = os.fork()\n"
        "    if child == 0: sys.stdin.read(); os._exit(0)\n"
        "print('left', flush=True); os.waitpid(child, 0)\n"
    )
    process = started(program, tmp_path, until="left")
    assert may_fill(tmp_path, "a", alone=True)
    process.communicate("", timeout=LIMIT_S)


@pytest.mark.process
def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from slipstream.core.machine.gpus import fill_gpus\n"
        "with fill_gpus(pathlib.Path(sys.argv[1]), ['a'], alone=True, limit_s=1):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = started(program, tmp_path, until="held")
    assert not may_fill(tmp_path, "a", alone=True)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert may_fill(tmp_path, "a", alone=True)


def test_gpus_have_the_names_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: GPUS)
    assert gpu_names({}, 1, 2) == ["GPU-1aaa", "GPU-2aaa"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "2,0"}, 0, 1) == ["GPU-2aaa"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "MIG-7"}, 0, 1) == ["MIG-7"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": ""}, 0, 1) == []


def test_without_a_gpu_there_is_no_turn(tmp_path: Path) -> None:
    with fill_gpus(tmp_path / "locks", [], alone=True, limit_s=0.0):
        assert not (tmp_path / "locks").exists()
