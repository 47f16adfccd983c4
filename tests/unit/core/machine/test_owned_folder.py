import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.core.machine.owned_folder import OwnedFolder, remove_abandoned
from support.rigs.waiting import LIMIT_S

OWNER = """
import signal, sys, tempfile
from slipstream.core.machine.owned_folder import OwnedFolder
tempfile.tempdir = sys.argv[1]
folders = [OwnedFolder("sockets"), OwnedFolder("sandbox")]
for folder in folders:
    (folder.path / "file").touch()
print("made", flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


def test_a_folder_is_private_and_is_removed(temporary: Path) -> None:
    folder = OwnedFolder("sockets")
    assert folder.path.parent == temporary
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "socket").touch()
    folder.close()
    assert not list(temporary.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("mode", [0o1777, 0o2777])
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_in_use(mode, temporary):
    temporary.chmod(mode)
    command = [sys.executable, "-c", OWNER, str(temporary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"made\n"
        own = OwnedFolder("sockets")
        remove_abandoned()
        assert len(list(temporary.iterdir())) == 3
        owner.send_signal(signal.SIGKILL)
        owner.wait(LIMIT_S)
    remove_abandoned()
    assert list(temporary.iterdir()) == [own.path]
    own.close()


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


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(temporary, monkeypatch):
    made: list[str] = []

    def make(prefix: str) -> str:
        made.append(str(temporary / f"{prefix}{len(made):08d}"))
        os.mkdir(made[-1], 0o700)
        if len(made) == 1:
            remove_abandoned()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    folder = OwnedFolder("sandbox")
    assert [str(folder.path)] == made[1:]
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
    # Another user must reach the folder, and the parents of pytest's own are private.
    script = (
        "import os, sys, tempfile\n"
        "from slipstream.core.machine.owned_folder import OwnedFolder\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "folder = OwnedFolder('agent')\n"
        "(folder.path / 'a' / 'b').mkdir(parents=True)\n"
        "(folder.path / 'a').chmod(0o555)\n"
        "folder.close()\n"
    )
    made = tempfile.mkdtemp(dir="/tmp")
    os.chmod(made, 0o777)
    subprocess.run([sys.executable, "-c", script, made], check=True, timeout=LIMIT_S)
    os.rmdir(made)


def test_a_temporary_folder_that_nobody_can_list_keeps_its_own(temporary, monkeypatch):
    folder = OwnedFolder("sockets")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    remove_abandoned()
    assert folder.path.is_dir()
    folder.close()
