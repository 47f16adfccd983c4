"""`make install` with a Python and a pip that only talk, and with package indexes on loopback."""

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from check_machine import problem, shortages
from support.rigs.completed import completed

ROOT = Path(__file__).parents[2]
PLENTY = 10**12
# Stands in for `python`: it makes an environment whose pip says what a test wants.
PYTHON = """#!/bin/sh
test "$1" = -m || exit 0
mkdir -p "$3/bin"
cp "$PIP" "$3/bin/pip"
cp "$0" "$3/bin/python"
"""
PIP = """#!/bin/sh
echo "WARNING: no word for a newcomer" >&2
case "$*" in *"$BROKEN"*) echo "ERROR: no route to host" >&2; exit 1;; esac
"""
# Makes a real environment, whose pip installs torch alone.
REAL_PYTHON = """#!/bin/sh
test "$2" = venv || exec "$REAL" "$@"
"$REAL" -m venv --without-pip "$3" && cp "$PIP" "$3/bin/pip"
"""
ONLY_TORCH = """#!/bin/sh
case "$*" in *torch==*) exec "$REAL" -m pip --python "${0%/*}/python" "$@";; esac
"""


@pytest.mark.parametrize("minor", [10, 13])
def test_a_python_that_is_not_supported_is_refused_before_anything_is_loaded(
    minor: int,
) -> None:
    assert problem(3, minor, PLENTY) == (
        f"Python must be 3.11 or 3.12, got 3.{minor}: make install PYTHON=python3.12"
    )


def test_a_disk_without_room_is_refused_before_anything_is_loaded() -> None:
    assert problem(3, 11, 4_940_000_000).startswith(
        "the environment takes 5 GB, and the disk of this folder has 4.9 GB left: "
    )
    assert problem(3, 12, PLENTY) == ""


def test_a_machine_with_one_core_and_little_memory_is_told_what_comes_of_it() -> None:
    assert shortages(1, 4_100_000_000) == [
        "a run needs 2 cores, and has 1 here: it is slow",
        "a run needs 8 GB of memory, and has 4.1 GB here: Linux may kill it",
    ]
    assert shortages(2, 7_900_000_000) == []


def make(*words, folder=ROOT, environ):
    # A make that runs these tests has set MAKEFLAGS and MAKELEVEL: this one would name its folder.
    ours = ("MAKE", "MFLAGS", "PIP_")
    outside = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return completed(
        ["make", "-f", str(ROOT / "Makefile"), *words],
        cwd=folder,
        env=outside | environ,
    )


def write_programs(folder: Path, **programs: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def install(folder: Path, broken: str) -> subprocess.CompletedProcess[str]:
    write_programs(folder, python=PYTHON, pip=PIP)
    words = (f"VENV={folder / 'venv'}", f"PYTHON={folder / 'python'}")
    return make(
        "install", *words, environ={"PIP": str(folder / "pip"), "BROKEN": broken}
    )


@pytest.mark.process
def test_warnings_of_pip_stay_out_of_sight(tmp_path: Path) -> None:
    done = install(tmp_path, broken="nothing is")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        f"installing the tested versions into {tmp_path / 'venv'}",
        "then vLLM, Megatron and the rest",
        "installed",
    ]


@pytest.mark.process
@pytest.mark.parametrize("part", ["torch==", "cpu.txt", "dev.txt", "--editable"])
def test_all_that_pip_said_is_shown_when_it_fails(tmp_path: Path, part: str) -> None:
    failed = install(tmp_path, broken=part)
    assert failed.returncode != 0
    assert "WARNING: no word for a newcomer\nERROR: no route to host\n" in failed.stderr
    assert not (tmp_path / "venv" / ".installed").exists()


class Index(ThreadingHTTPServer):
    """Serves the folders below `root` as package indexes: NAME/torch/ holds NAME's builds."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            ("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))
        )
        self.root = root
        self.asked: list[str] = []

    def add(self, name: str, version: str, *, cuda: str | None = None) -> None:
        """Adds a build of torch to the index `name`; without one it still has a page of torch."""
        wheel = self.root / name / "torch" / f"torch-{version}-py3-none-any.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as files:
            files.writestr(
                "torch/__init__.py", "raise ImportError('the install imports no torch')"
            )
            files.writestr("torch/version.py", f"cuda = {cuda!r}")
            names = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            files.writestr(f"{info}/METADATA", names)
            files.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            files.writestr(f"{info}/RECORD", "")

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Quiet(SimpleHTTPRequestHandler):
    """Notes what was asked for, without a word."""

    server: Index

    def log_message(self, format: str, *words: object) -> None:
        self.server.asked.append(self.path)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "indexes") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def install_torch(folder, index, *words, links=""):
    """`make install` as far as torch, where pip's own index is `pypi` and PyTorch's `pytorch`."""
    write_programs(folder, python=REAL_PYTHON, pip=ONLY_TORCH)
    environ = {
        "REAL": sys.executable,
        "PIP": str(folder / "pip"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "PIP_INDEX_URL": index.url("pypi"),
        "PIP_FIND_LINKS": links,
    }
    indexes = f"PYTORCH_INDEX={index.url('pytorch')}"
    place = (f"VENV={folder / 'venv'}", f"PYTHON={folder / 'python'}")
    return make("install", *place, indexes, *words, environ=environ)


def installed_torch(folder: Path) -> str:
    glob = (folder / "venv").glob("lib/python*/site-packages/torch-*.dist-info")
    return " ".join(path.name.removesuffix(".dist-info") for path in glob)


@pytest.mark.process
def test_the_cpu_build_comes_from_pytorchs_index_where_the_configured_one_has_none(
    tmp_path, index
):
    index.add("pypi", "2.13.0", cuda="13.0")
    index.add("pytorch", "2.13.0+cpu")
    done = install_torch(tmp_path, index)
    assert (done.returncode, done.stderr) == (0, "")
    assert installed_torch(tmp_path) == "torch-2.13.0+cpu"


@pytest.mark.long
@pytest.mark.process
def test_no_other_index_is_asked_where_the_configured_one_has_the_cpu_build(
    tmp_path, index
):
    index.add("pypi", "2.13.0", cuda="13.0")
    index.add("folder", "2.13.0+cpu")
    done = install_torch(
        tmp_path, index, links=str(tmp_path / "indexes" / "folder" / "torch")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert installed_torch(tmp_path) == "torch-2.13.0+cpu"
    assert not [path for path in index.asked if "pytorch" in path]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("given", [True, False])
def test_without_a_cpu_build_the_install_stops_and_says_how_to_name_an_index(
    given: bool, tmp_path: Path, index: Index
) -> None:
    index.add("pypi", "2.13.0", cuda="13.0")
    index.add("pytorch", "2.12.0+cpu")
    words = [f"TORCH_INDEX={index.url('pypi')}"] * given
    failed = install_torch(tmp_path, index, *words)
    assert failed.returncode != 0
    # make's own line is the last one.
    *_, cause, remedy, _ = failed.stderr.splitlines()
    assert cause == "ERROR: No matching distribution found for torch==2.13.0+cpu"
    assert remedy == (
        "slipstream: name an index that serves torch==2.13.0+cpu: make install TORCH_INDEX=URL"
    )
    assert installed_torch(tmp_path) == ""


@pytest.mark.long
@pytest.mark.process
def test_a_cuda_build_under_the_name_of_the_cpu_build_stops_the_install_in_one_line(
    tmp_path: Path, index: Index
) -> None:
    index.add("pypi", "2.13.0+cpu", cuda="13.0")
    failed = install_torch(tmp_path, index)
    assert failed.returncode != 0
    line, _ = failed.stderr.splitlines()
    venv = tmp_path / "venv"
    assert line == (
        "slipstream: torch 2.13.0+cpu of your package index is the build for CUDA 13.0, and vLLM's "
        f"CPU build needs torch's: rm -r {venv}; make install "
        "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    )
    assert not (venv / ".installed").exists()


SLIPSTREAM = """#!/bin/sh
echo "slipstream $*"
exit "${CODE:-0}"
"""


def make_run(
    folder: Path, *words: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """`make quickstart` where everything is installed."""
    for name in (
        "pyproject.toml",
        *(f"requirements/{n}.txt" for n in ("common", "cpu", "dev")),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    write_programs(folder / ".venv" / "bin", slipstream=SLIPSTREAM)
    (folder / ".venv" / ".installed").touch()
    return make("quickstart", *words, folder=folder, environ={"CODE": str(code)})


def write_run(folder: Path, state: str) -> Path:
    run = folder / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "command.lock").touch()
    (run / "summary.json").write_text(json.dumps({"state": state}, indent=2))
    return run


@pytest.mark.process
@pytest.mark.parametrize("state", ["stopped", "failed", "finished"])
def test_a_run_is_never_removed_unasked(state: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, state)
    again = make_run(tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    first, ran = again.stdout.splitlines()
    assert first.startswith("checking the settings, then starting vLLM")
    assert ran == "slipstream quickstart"
    assert (run / "summary.json").exists()
    # The command refuses a finished run; another refusal is none that a new run would cure.
    errors = make_run(tmp_path, code=2).stderr
    assert ("make quickstart FRESH=1 removes runs/quickstart" in errors) == (
        state == "finished"
    )
    assert (run / "summary.json").exists()


@pytest.mark.process
def test_a_run_is_removed_when_that_is_asked_for_and_nobody_writes_it(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, "finished")
    with (run / "command.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = make_run(tmp_path, "FRESH=1")
    assert refused.returncode != 0
    assert (
        "runs/quickstart is written by a run that goes on: end it first\n"
        in refused.stderr
    )
    assert (refused.stdout, (run / "summary.json").exists()) == ("", True)
    anew = make_run(tmp_path, "FRESH=1")
    assert (anew.returncode, anew.stderr) == (0, "")
    assert anew.stdout.splitlines()[1] == "slipstream quickstart"
    assert not run.exists()
