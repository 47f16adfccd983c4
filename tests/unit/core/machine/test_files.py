"""Pipes and devices in the place of a run's files: refused in one line, and nobody waits."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.machine.files import (
    OwnedFolder,
    open_regular,
    read_regular,
    remove_abandoned,
    replace_file,
)
from slipstream.core.models.model_files import read_header
from slipstream.core.run_folder import journaled_run_id
from slipstream.environments.question_files import named_rows
from slipstream.learner.controller.records.journal import Journal, read_batch
from slipstream.learner.controller.reporting.trackers import ResultFile, read_rows
from slipstream.protocol.access.tokens import read_tokens
from slipstream.protocol.checkpoints import read_manifest
from support.rigs.small_disks import small_disk
from support.rigs.waiting import LIMIT_S

ODD = "it is a pipe or a device, no regular file"
MAKERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def odd(request, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a file of a name that is no regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        request.param(path)
        return path

    return make


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
def test_only_a_regular_file_is_opened(odd, tmp_path: Path, mode: str) -> None:
    with pytest.raises(OSError, match=ODD):
        open_regular(odd("file"), mode)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path, mode)
    with open_regular(tmp_path / "new", "ab") as file:
        file.write(b"abc")
    assert read_regular(tmp_path / "new") == b"abc"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.process
def test_a_full_disk_leaves_the_earlier_file_and_the_error_names_it(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "state"
        replace_file(path, b"earlier")
        with pytest.raises(OSError, match=f"No space left on device: '{path}'$"):
            replace_file(path, bytes(1 << 20))
        assert (path.read_bytes(), [*disk.iterdir()]) == (b"earlier", [path])


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "settings": ("run.toml", load_config),
    "a token file": ("token", read_tokens),
    "a log": ("journal/journal.log", lambda path: Journal(path.parent)),
    "a later log": ("journal/journal-50.log", lambda path: Journal(path.parent)),
    "the run's id": (
        "journal/journal.log",
        lambda path: journaled_run_id(path.parents[1]),
    ),
    "a batch": (
        "batches/step-000003.pb",
        lambda path: read_batch(path.parents[1], 3, 0).header,
    ),
    "a manifest": (
        "step-000003/manifest.json",
        lambda path: read_manifest(path.parent),
    ),
    "questions": ("questions.jsonl", lambda path: list(named_rows(path))),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_reader_refuses_what_never_ends_in_one_line(odd, name, read) -> None:
    path = odd(name)
    with pytest.raises((SlipstreamError, ConfigError)) as caught:
        read(path)
    assert "a pipe or a device, no regular file" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert name.partition("/")[0] in str(caught.value)


def test_rows_and_weights_of_what_never_ends_are_no_rows_and_no_weights(odd) -> None:
    messages: list[str] = []
    path = odd("metrics.jsonl")
    assert list(read_rows(path, messages.append)) == []
    rows = ResultFile(path, messages.append)
    rows.append(b"{}\n")
    rows.close()
    assert [*dict.fromkeys(messages)] == [
        f"{path} cannot be written: {ODD}; what comes is lost until it can",
        f"{path}: the last 1 records were lost",
    ]
    with pytest.raises(OSError, match=ODD):
        read_header(odd("model.safetensors"))


OWNER = """
import signal, sys, tempfile
from slipstream.core.machine.files import OwnedFolder
tempfile.tempdir = sys.argv[1]
folders = [OwnedFolder("sockets"), OwnedFolder("sandbox")]
for folder in folders:
    (folder.path / "file").touch()
print("made", flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Sockets are not made in a longer path.
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_sockets_have_short_paths_whatever_the_temporary_folder_is(
    tmp_path, monkeypatch
) -> None:
    long = tmp_path / ("x" * 67)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for kind, is_short in (("sockets", True), ("sandbox", False)):
        folder = OwnedFolder(kind)
        assert (folder.path.parent != long) is is_short
        assert not is_short or len(os.fsencode(folder.path)) < 63
        folder.close()
        assert not folder.path.exists()


def test_a_folder_is_private_and_is_removed(temporary: Path) -> None:
    folder = OwnedFolder("sockets")
    assert folder.path.parent == temporary
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "socket").touch()
    folder.close()
    assert not list(temporary.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("mode", [0o1777, 0o2777])
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_in_use(
    mode, temporary
):
    temporary.chmod(mode)
    command = [sys.executable, "-c", OWNER, str(temporary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"made\n"
        folder = OwnedFolder("sockets")
        remove_abandoned()
        assert len(list(temporary.iterdir())) == 3
        owner.send_signal(signal.SIGKILL)
        owner.wait(LIMIT_S)
    remove_abandoned()
    assert list(temporary.iterdir()) == [folder.path]
    folder.close()


def test_only_folders_of_this_kind_are_removed(temporary: Path, tmp_path: Path) -> None:
    precious = tmp_path / "slipstream-sockets-precious"
    precious.mkdir(mode=0o700)
    (temporary / "slipstream-sockets-linkedto").symlink_to(precious)
    for name in ("slipstream", "slipstream-sources", "slipstream-sockets-mine"):
        (temporary / name).mkdir(mode=0o700)
    (temporary / "slipstream-sockets-readable").mkdir()
    (temporary / "slipstream-sockets-readable").chmod(0o755)
    (temporary / "slipstream-sandbox-somefile").touch(mode=0o700)
    before = set(temporary.iterdir())
    (temporary / "slipstream-sockets-leftover").mkdir(mode=0o700)
    remove_abandoned()
    assert set(temporary.iterdir()) == before
    assert precious.is_dir()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(
    temporary, monkeypatch
):
    folders: list[str] = []

    def make(prefix: str, **_: object) -> str:
        folders.append(str(temporary / f"{prefix}{len(folders):08d}"))
        os.mkdir(folders[-1], 0o700)
        if len(folders) == 1:
            remove_abandoned()
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    folder = OwnedFolder("sandbox")
    assert [str(folder.path)] == folders[1:]
    assert list(temporary.iterdir()) == [folder.path]
    folder.close()


@pytest.mark.process
def test_a_deep_folder_is_removed(temporary: Path) -> None:
    folder = OwnedFolder("sandbox")
    command = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    subprocess.run([sys.executable, "-c", command], cwd=folder.path, check=True)
    folder.close()
    assert not list(temporary.iterdir())


@pytest.mark.process
def test_a_folder_with_folders_that_may_not_be_written_is_removed() -> None:
    # A different user must reach the folder, and the parents of pytest's own are private.
    script = (
        "import os, sys, tempfile\n"
        "from slipstream.core.machine.files import OwnedFolder\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "folder = OwnedFolder('agent')\n"
        "(folder.path / 'a' / 'b').mkdir(parents=True)\n"
        "(folder.path / 'a').chmod(0o555)\n"
        "folder.close()\n"
    )
    folder = tempfile.mkdtemp(dir="/tmp")
    os.chmod(folder, 0o777)
    subprocess.run([sys.executable, "-c", script, folder], check=True, timeout=LIMIT_S)
    os.rmdir(folder)


def test_a_temporary_folder_that_nobody_can_list_keeps_its_own(temporary, monkeypatch):
    folder = OwnedFolder("sockets")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    remove_abandoned()
    assert folder.path.is_dir()
    folder.close()
