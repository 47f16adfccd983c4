"""A reader of a page: saves its files and carries out its commands, in their order."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from support.rigs.completed import completed
from support.rigs.run_processes import PROGRAM

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"Save this as `([\w.]+)`")
# The reader has a clone; the test has an environment and a model.
NOT_HERE = ("make ", ". ")
LIMIT_S = 600


class Reader:
    """Goes through `page` in `folder`; `steps` in the place of as many as it asks for.

    `meanwhile`: commands of the page that are given while its run goes on.
    """

    def __init__(
        self, page: Path, folder: Path, steps: int, *, meanwhile: Sequence[str] = ()
    ) -> None:
        self.page = page
        self.folder = folder
        self.meanwhile = meanwhile
        self.steps = steps
        path = f"{PROGRAM.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = os.environ | {"PATH": path}
        self.outputs: dict[str, str] = {}

    def go(self) -> None:
        """Saves each file, and carries out each command."""
        # A command that runs while the run goes on may need a file that stands further down.
        assert set(self.meanwhile) <= {*self._commands()}
        for command in self._commands():
            if re.fullmatch(r"slipstream run \S+", command):
                self._watch_run(command)
            elif command not in self.meanwhile:
                self._carry_out(command)

    def _commands(self) -> Iterator[str]:
        text = self.page.read_text()
        end = 0
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
        text = re.sub(
            r"^steps = \d+$", f"steps = {self.steps}", text, flags=re.MULTILINE
        )
        if self.steps < 100:
            text = text.replace("--step 100", f"--step {self.steps}")
        return text

    def say(self, command: str, lines: Iterable[str] = ()) -> str:
        """What a command prints that reads these lines."""
        done = completed(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=self.environ,
            timeout=LIMIT_S,
            input="".join(f"{line}\n" for line in lines),
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _carry_out(self, command: str) -> None:
        self.outputs[command] = self.say(command)

    def _watch_run(self, command: str) -> None:
        """Runs to the end; meanwhile the second terminal asks how it goes."""
        shown = self.folder / "shown"
        with shown.open("w") as file:
            run = subprocess.Popen(
                command.split(),
                cwd=self.folder,
                env=self.environ,
                stdout=file,
                stderr=file,
            )
            try:
                ends_s = time.monotonic() + LIMIT_S
                while not re.search(r"step +1/", text := shown.read_text()):
                    assert run.poll() is None and time.monotonic() < ends_s, text
                    time.sleep(0.05)
                for asked in self.meanwhile:
                    self._carry_out(asked)
                assert run.wait(LIMIT_S) == 0, shown.read_text()
            finally:
                run.kill()
                run.wait()
        self.outputs[command] = shown.read_text()
