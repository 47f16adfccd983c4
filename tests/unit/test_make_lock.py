import functools
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import make_lock
import pytest
from make_lock import ROOT, lock_of, pins_of
from support.rigs.waiting import LIMIT_S

pytestmark = [pytest.mark.process, pytest.mark.long]
UV = """#!/bin/sh
exec sed 's/$/ --hash=sha256:DIGEST/'
"""


def write_wheel(
    folder: Path, name: str, version: str, tag: str = "py3-none-any"
) -> str:
    """Writes a wheel without modules; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{version.partition('-')[0]}"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as files:
        package = name.replace("_", "-")
        number = stem.rpartition("-")[2]
        text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n"
        files.writestr(f"{stem}.dist-info/METADATA", text)
        about = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        files.writestr(f"{stem}.dist-info/WHEEL", about)
        files.writestr(f"{stem}.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def release(tmp_path: Path) -> Iterator[str]:
    """An address that serves tmp_path/release."""
    (tmp_path / "release").mkdir()
    handler = functools.partial(
        SimpleHTTPRequestHandler, directory=str(tmp_path / "release")
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}
        )
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lists of small packages, and a `uv` that knows one digest."""
    folder = tmp_path / "requirements"
    digest = write_wheel(tmp_path / "index", "small", "1.0")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(UV.replace("DIGEST", digest))
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    folder.mkdir()
    (folder / "common.txt").write_text("# Both.\nSmall==1.0\n")
    (folder / "cpu.txt").write_text("-r common.txt\ntorch==2.13.0+cpu\n")
    (folder / "gpu.txt").write_text(
        "-r common.txt\ntorch==2.13.0\ntransformer-engine-torch==2.11.0\n"
    )
    (folder / "gpu-measured.txt").write_text("torch==2.11.0\n")
    return folder


def test_pip_installs_a_lock_into_an_empty_folder_from_addresses_with_digests(
    tmp_path: Path, release: str, lists: Path
) -> None:
    wheels = tmp_path / "release"
    write_wheel(wheels, "slipstream_rl", "0.1.0")
    tag = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"
    digest = write_wheel(wheels, "torch", "2.13.0+cpu", f"{tag}-manylinux_2_28_x86_64")
    link = f"torch-2.13.0%2Bcpu-{tag}-manylinux_2_28_x86_64.whl#sha256={digest}"
    (wheels / "torch.html").write_text(f'<a href="/{link}">torch</a>')
    lock = lock_of("cpu", wheels, release, page=f"{release}/torch.html", folder=lists)
    (wheels / "cpu.txt").write_text(lock)
    index = ["--no-index", "--find-links", str(tmp_path / "index")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *index]
    command += ["--target", str(tmp_path / "empty"), "--requirement"]
    subprocess.run([*command, f"{release}/cpu.txt"], check=True, timeout=300)
    names = {path.name for path in (tmp_path / "empty").glob("*.dist-info")}
    assert names == {
        f"{n}.dist-info"
        for n in ("slipstream_rl-0.1.0", "small-1.0", "torch-2.13.0+cpu")
    }
    (wheels / "cpu.txt").write_text(lock.replace(digest, "0" * 64))
    done = subprocess.run(
        [*command, f"{release}/cpu.txt"], capture_output=True, text=True
    )
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_another_python_is_refused_before_anything_is_downloaded(
    tmp_path: Path, release: str, lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_lock, "PYTHONS", (8, 9))
    # No one serves what the other lines name.
    write_wheel(tmp_path / "release", "slipstream_rl", "0.1.0")
    (tmp_path / "release" / "torch.html").touch()
    page = f"{release}/torch.html"
    address = f"{release}/none"
    lock = lock_of("cpu", tmp_path / "release", address, page=page, folder=lists)
    (tmp_path / "lock.txt").write_text(lock)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--dry-run",
    ]
    command = [*pip, "--requirement", str(tmp_path / "lock.txt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == (
        "ERROR: slipstream_needs_python_3.8_or_3.9-0-cp38.cp39-none-any.whl is not a supported "
        "wheel on this platform."
    )


def test_a_stack_takes_the_extension_that_was_built_for_its_torch(tmp_path, lists):
    wheels = tmp_path / "dist"
    write_wheel(wheels, "slipstream_rl", "0.1.0")
    built = {
        number: write_wheel(
            wheels,
            "transformer_engine_torch",
            f"2.11.0-{number}",
            "cp312-cp312-linux_x86_64",
        )
        for number in (211, 213)
    }
    for stack, number in (("gpu", 213), ("gpu-measured", 211)):
        lock = lock_of(stack, wheels, "https://there", folder=lists)
        (line,) = [line for line in lock.splitlines() if line.startswith("transformer")]
        assert line == (
            f"transformer-engine-torch @ https://there/transformer_engine_torch-2.11.0-{number}-"
            f'cp312-cp312-linux_x86_64.whl ; python_version == "3.12" --hash=sha256:{built[number]}'
        )
        assert "\nsmall==1.0 --hash=sha256:" in lock


def test_an_extension_that_is_there_is_not_built_again(tmp_path: Path) -> None:
    version = pins_of("gpu")["transformer-engine-torch"]
    tag = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_x86_64"
    write_wheel(tmp_path, "transformer_engine_torch", f"{version}-213", tag)
    python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [ROOT / "deploy" / "build_te_wheel.sh", "gpu", tmp_path]
    # Without pip's indices a build would fail.
    variables = os.environ | {
        "PATH": python,
        "PIP_NO_INDEX": "1",
        "TMPDIR": str(tmp_path),
    }
    subprocess.run(command, check=True, timeout=LIMIT_S, env=variables)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [command[0], "gpu-measured", tmp_path], check=True, env=variables
        )


def test_a_wheel_of_ours_that_is_missing_is_named(tmp_path: Path, lists: Path) -> None:
    with pytest.raises(ValueError, match="must hold a wheel of slipstream-rl$"):
        lock_of("cpu", tmp_path, "https://there", folder=lists)
    write_wheel(tmp_path, "slipstream_rl", "0.1.0")
    with pytest.raises(
        ValueError, match="wheel of transformer-engine-torch-2.11.0-213$"
    ):
        lock_of("gpu", tmp_path, "https://there", folder=lists)
