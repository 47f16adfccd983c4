"""The package as a user installs it: one wheel, and a client without torch or vLLM."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from support.rigs.completed import completed
from support.rigs.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_all_roots_under_one_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for module in (
        "slipstream/__init__.py",
        "slipstream/v1/trajectory_pb2.py",
        "slipstream/core/staleness.py",
        "slipstream/client/py.typed",
        "slipstream/client/requirements/common.txt",
        "slipstream/rollout_server/__main__.py",
        "slipstream/learner/controller/__main__.py",
        "slipstream/learner/trainer/__main__.py",
    ):
        assert module in names


@pytest.mark.long
def test_the_client_installs_alone_and_brings_no_torch(wheel, tmp_path):
    # The pip of the tests installs into the new environment: a pip of its own takes seconds.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    # Compiling all modules takes seconds; those that are imported are compiled then.
    install = [*pip, "install", "--quiet", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=280)
    code = (
        "import importlib.util, slipstream.client as c; c.Client, c.Environment, c.StepResult; "
        "import slipstream; slipstream.run, slipstream.__version__; "
        "from slipstream.client.agent_gateway import Gateway; "
        "from slipstream.environments.command import Command; "
        "from slipstream.environments.echo import Echo; "
        "assert importlib.util.find_spec('torch') is None; "
        "assert importlib.util.find_spec('vllm') is None"
    )
    subprocess.run([str(python), "-c", code], check=True, timeout=LIMIT_S, cwd=tmp_path)
    command = str(tmp_path / "venv" / "bin" / "slipstream")
    done = completed([command, "status", "--controller", "127.0.0.1:1"])
    assert done.returncode == 2
    assert done.stderr.startswith("slipstream: no controller answers at 127.0.0.1:1; ")
    assert len(done.stderr.splitlines()) == 1
    # The doctor tells what is not installed here, and looks at the machine for that.
    done = completed([command, "doctor"])
    assert done.stderr == ""
    assert done.returncode == 1
    assert (
        "torch, megatron-core, megatron-bridge, transformers, not installed"
        in done.stdout
    )
    assert (
        "install the lock cpu.txt, gpu.txt or gpu-measured.txt of the release"
        in done.stdout
    )
    done = completed([command, "quickstart"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "slipstream: the learner needs torch, megatron-core, megatron-bridge, transformers, not "
        "installed here: install the lock cpu.txt, gpu.txt or gpu-measured.txt of the release: "
        "docs/support.md\n",
    )
    assert not (tmp_path / "models").exists()
