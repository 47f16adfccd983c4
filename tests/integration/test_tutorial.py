"""Every command and file of docs/tutorial.md, in its order, as a reader would go through it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from slipstream.client.launch.preflight import free_port  # noqa: E402
from support.rigs.run_processes import PROGRAM  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_survives")

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"Save this as `([\w.]+)`")
# The reader has a clone; the test has an environment and a model.
NOT_HERE = ("make ", ". ")
LIMIT_S = 600


class Reader:
    """Goes through the page in `folder`; `steps` in the place of the 150 that it asks for."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        path = f"{PROGRAM.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = os.environ | {"PATH": path}
        self.outputs: dict[str, str] = {}

    def go(self) -> None:
        """Saves each file, and carries out each command."""
        for command in self._commands():
            if command == "slipstream run reverse.toml":
                self._watch_run(command)
            elif command == "slipstream dashboard":
                self._open_dashboard()
            elif command not in ("slipstream status", "slipstream environments"):
                self._carry_out(command)

    def _commands(self) -> Iterator[str]:
        text, end = PAGE.read_text(), 0
        for block in BLOCK.finditer(text):
            names = FILE.findall(text[end : block.start()])
            end = block.end()
            if names:
                (self.folder / names[-1]).write_text(self._adapted(block[2]))
            elif block[1] == "":
                yield from (
                    self._adapted(line)
                    for line in block[2].splitlines()
                    if not line.startswith(NOT_HERE)
                )

    def _adapted(self, text: str) -> str:
        text = text.replace("steps = 150", f"steps = {self.steps}")
        if self.steps < 100:
            text = text.replace("--step 100", f"--step {self.steps}")
        return text.replace(
            "[algorithm]", f'[controller]\naddress = "{self.address}"\n\n[algorithm]'
        )

    def _carry_out(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self.outputs[command] = done.stdout

    def _watch_run(self, command: str) -> None:
        """Runs to the end; meanwhile the second terminal asks how it goes."""
        shown = self.folder / "shown"
        with shown.open("w") as file:
            run = subprocess.Popen(
                command.split(), cwd=self.folder, env=self.environ, stdout=file, stderr=file
            )
            try:
                ends_s = time.monotonic() + LIMIT_S
                while "step   1/" not in (text := shown.read_text()) and "step 1/" not in text:
                    assert run.poll() is None and time.monotonic() < ends_s, text
                    time.sleep(0.05)
                for asked in ("status", "environments"):
                    self._carry_out(f"slipstream {asked} --controller {self.address}")
                assert run.wait(LIMIT_S) == 0, shown.read_text()
            finally:
                run.kill()
                run.wait()
        self.outputs[command] = shown.read_text()

    def _open_dashboard(self) -> None:
        page = subprocess.Popen(
            ["slipstream", "dashboard", "--port", "0"],
            cwd=self.folder,
            env=self.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert page.stdout is not None
            assert "http://127.0.0.1:" in page.stdout.readline()
        finally:
            page.terminate()
            page.communicate(timeout=60)


def read_through(folder: Path, model: Path, steps: int) -> Reader:
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(model)
    reader = Reader(folder, steps)
    reader.go()
    return reader


def test_every_command_of_the_tutorial_works(tmp_path: Path, tiny_model: Path) -> None:
    reader = read_through(tmp_path, tiny_model, 8)
    assert "28" in reader.outputs[next(c for c in reader.outputs if "--check" in c)]
    assert "reward held out" in reader.outputs["slipstream run reverse.toml"]
    assert "reverse" in reader.outputs[f"slipstream environments --controller {reader.address}"]
    assert reader.outputs["python replies.py"].count("<reply> ->") >= 4
    (chat,) = (text for command, text in reader.outputs.items() if "chat.py" in command)
    assert len(chat.splitlines()) == 2


@pytest.mark.slow
def test_the_model_of_the_tutorial_learns(tmp_path: Path, tiny_model: Path) -> None:
    reader = read_through(tmp_path, tiny_model, 150)
    summary = json.loads((tmp_path / "runs" / "reverse" / "summary.json").read_text())
    assert summary["reward_last"] > 0.85
    assert summary["reward_heldout"] > 0.7
    (chat,) = (text for command, text in reader.outputs.items() if "chat.py" in command)
    assert chat.splitlines()[0].split() == ["a", "d"]
