"""Runs the quickstart's settings, or another file's, with some changed, and reads the results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "deploy" / "configs" / "quickstart.toml"
# Limit of a run, most of which take a minute or two; its processes end with the command.
RUN_LIMIT_S = 3600.0
# Holds the processor time of a run, in the run's folder.
CPU_FILE = "cpu_s.json"


@dataclass(frozen=True)
class Run:
    """The steps and the evaluation rounds of metrics.jsonl, and summary.json."""

    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    # Seconds from the start of the command to its end.
    wall_s: float
    # Processor time of all its processes; None where the run was cut off and went on.
    cpu_s: float | None = None


def make_model(folder: Path) -> Path:
    """Makes the quickstart's model below `folder`, and returns its path."""
    script = ROOT / "deploy" / "make_tiny_model.py"
    command = [sys.executable, str(script), str(folder / "model")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "model"


def run_quickstart(
    folder: Path,
    name: str,
    overrides: Sequence[str],
    *,
    config: Path = CONFIG,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float = RUN_LIMIT_S,
) -> Run:
    """Makes one whole run in `folder`, which holds the model; environments may lie in `cwd`.

    `config` takes the place of the quickstart's settings.

    A run that was cut off there goes on; several may be made at the same time. RuntimeError with
    the end of its stderr when it fails; subprocess.TimeoutExpired after `limit_s`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [
        f"run.name={name}",
        f"run.dir={folder}",
        f"model.path={folder}/model",
        f"controller.address=127.0.0.1:{port}",
        "learner.export_final=false",
        *overrides,
    ]
    is_new = not (folder / name).exists()
    started_s = time.monotonic()
    # The command runs as a module: the packages may be on PYTHONPATH only.
    command = [sys.executable, "-m", "slipstream.client.cli", "run", str(config), *settings]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    cpu_s = _run_to_end(command, variables, cwd, limit_s)
    if is_new:
        (folder / name / CPU_FILE).write_text(json.dumps(cpu_s))
    return _read(folder / name, time.monotonic() - started_s)


def _run_to_end(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path | None, limit_s: float
) -> float:
    """Returns the processor time of a command and of all that it started and waited for."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, env=environ, cwd=cwd, stdout=subprocess.DEVNULL, stderr=stderr
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            # Popen's own kill would take the status that wait4 waits for.
            os.kill(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            # Popen's own wait would not tell the processor time of this process alone.
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if late.is_set():
            raise subprocess.TimeoutExpired(command, limit_s)
        if process.returncode != 0:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace")
            raise RuntimeError(f"{command[5]} failed: {said[-2000:]}")
    return used.ru_utime + used.ru_stime


def finished_run(folder: Path, name: str) -> Run | None:
    """Returns a run that lies finished in `folder`, or None; its `wall_s` is that of its steps."""
    summary = folder / name / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["state"] != "finished":
        return None
    return _read(folder / name)


def _read(run_folder: Path, wall_s: float | None = None) -> Run:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    everything = [json.loads(line) for line in lines]
    rows = [row for row in everything if "step" in row]
    evaluations = [row for row in everything if "evaluation_step" in row]
    summary = json.loads((run_folder / "summary.json").read_text())
    known = run_folder / CPU_FILE
    cpu_s = json.loads(known.read_text()) if known.exists() else None
    wall_s = rows[-1]["wall_s"] if wall_s is None else wall_s
    return Run(rows, evaluations, summary, wall_s, cpu_s)
