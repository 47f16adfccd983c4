"""Runs deploy/configs/quickstart.toml with some settings changed, and reads its results."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
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
    folder: Path, name: str, overrides: Sequence[str], *, cwd: Path | None = None
) -> Run:
    """Makes one whole run in `folder`, which holds the model; environments may lie in `cwd`.

    A run that was cut off there goes on. RuntimeError with the end of its stderr when it fails;
    subprocess.TimeoutExpired after RUN_LIMIT_S.
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
    started_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        # The command runs as a module: the packages may be on PYTHONPATH only.
        [sys.executable, "-m", "slipstream.client.cli", "run", str(CONFIG), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if is_new:
        (folder / name / CPU_FILE).write_text(json.dumps(cpu_s))
    return _read(folder / name, time.monotonic() - started_s)


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
