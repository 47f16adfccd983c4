"""The parts that all benchmarks share: the machine, versions, medians, tables, results as JSON.

A result lies in benchmarks/results/NAME.json and, when the environment variable OUT names a folder,
there too; `note` adds a line to NAME.jsonl while the benchmark still runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This import comes before gRPC's: its setting for forks must hold for programs started here too.
import slipstream.rollout_server  # noqa: F401
from slipstream.core.machine.description import PACKAGES, installed, processor

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Arguments of benchmarks that are places of files on a machine.
PLACES = ("out", "folder", "logs", "model_folder", "peer_path", "before")
_STARTED_S = time.monotonic()


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    least: float
    greatest: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of `values`; ValueError if there are none."""
        if not values:
            raise ValueError("a spread needs at least one value")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """Returns `median (least-greatest)`, each times `scale`."""
        shown = [f"{scale * v:,.{digits}f}" for v in (self.median, self.least, self.greatest)]
        return f"{shown[0]} ({shown[1]}-{shown[2]})"


def machine() -> dict[str, Any]:
    """Returns processor, cores that this process may use, memory in GiB, GPUs with driver."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def versions(*more: str) -> dict[str, str]:
    """Returns the installed versions of the packages that decide about speed, and of `more`."""
    return installed((*PACKAGES, *more))


def command() -> str:
    """Returns the command line of this process, without the places of files on this machine."""
    places = "|".join(place.replace("_", "-") for place in PLACES)
    path = Path(sys.argv[0]).resolve().with_suffix("")
    module = ".".join(path.relative_to(ROOT).parts) if path.is_relative_to(ROOT) else path.stem
    return re.sub(rf" --({places})[ =]\S+", "", " ".join(["python -m", module, *sys.argv[1:]]))


def program(module: str) -> list[str]:
    """Returns the command that starts `module` of `benchmarks`, in the repository's folder."""
    return [sys.executable, "-m", f"benchmarks.{module}"]


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns a benchmark's arguments and their defaults, without the places of files."""
    told = vars(arguments).items()
    return {key: str(value) for key, value in told if key not in PLACES}


def visible(places: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a child that gets these of the GPUs visible here."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else []
    return ",".join(names[place] if names else str(place) for place in places)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def progress(text: str) -> None:
    """Prints a line with the seconds since the start, at once."""
    print(f"# {time.monotonic() - _STARTED_S:6.1f} s  {text}", flush=True)


@contextlib.contextmanager
def part(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Runs a part of a benchmark whose failure must not end the other parts.

    The traceback is printed and kept in `failures`, which belongs into the result.
    """
    progress(name)
    try:
        yield
    except Exception:  # noqa: BLE001 - recorded: a benchmark goes on with its next part
        failures[name] = traceback.format_exc()
        print(failures[name], flush=True)


def note(name: str, row: Mapping[str, Any]) -> None:
    """Adds one measurement to NAME.jsonl in the folder OUT, if there is one."""
    folder = _out_folder()
    if folder is not None:
        with (folder / f"{name}.jsonl").open("a") as file:
            print(json.dumps(row), file=file, flush=True)


def write_result(name: str, record: Mapping[str, Any], path: Path | None = None) -> Path:
    """Writes `record` with date, machine, versions and command to `path`; returns the path.

    In a folder, by default benchmarks/results, it is NAME.json; a copy goes to the folder OUT.
    """
    path = path or RESULTS
    if path.is_dir():
        path /= f"{name}.json"
    whole = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "versions": versions(),
        **record,
    }
    text = text_of(whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    folder = _out_folder()
    if folder is not None:
        (folder / f"{name}.json").write_text(text)
    return path


def text_of(record: Mapping[str, Any]) -> str:
    """Returns a result as JSON with a line for each entry of its tables and lists."""

    def lines(value: object) -> str:
        if not value or not isinstance(value, dict | list):
            return json.dumps(value, default=str)
        is_table = isinstance(value, dict)
        entries = value.items() if is_table else enumerate(value)
        shown = [
            (f"{json.dumps(key)}: " if is_table else "") + json.dumps(entry, default=str)
            for key, entry in entries
        ]
        return "{}\n    {}\n  {}".format("[{"[is_table], ",\n    ".join(shown), "]}"[is_table])

    entries = [f"  {json.dumps(key)}: {lines(value)}" for key, value in record.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _out_folder() -> Path | None:
    name = os.environ.get("OUT")
    if not name:
        return None
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        # This machine has no GPU, or none that the driver shows.
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def toml_of(value: Any) -> str:  # noqa: ANN401 - any value of JSON
    """Returns a value of JSON as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_of(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)
