r"""Takes every family of models through three steps, and compares learner and server in bfloat16.

Each family is a random model of its own: at true width with few layers on a GPU, tiny on a CPU.
`logprob_gap.py` trains it in processes of its own, with a time limit; a family that fails leaves a
row that says so, and its logs.

    python benchmarks/families.py --device cuda
    python benchmarks/families.py --device cuda --gpus 2
    python benchmarks/families.py --families qwen3,gpt-oss

On a GPU machine learner and server of a family share one GPU. A family begins once a GPU has room
for it beside others: no figure here is a time. Prints one table at the end, with Qwen3 first;
benchmarks/results/families.json is written after each family.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from family_shapes import FAMILIES
from measure import RESULTS, progress, table, visible, write_result
from rig import HERE

COLUMNS = {
    "kl_k3": "KL (k3)",
    "gap_mean": "gap, mean",
    "gap_max": "gap, max",
    "gap_mean_at_start": "gap before updates",
    "fresh_gap_max": "exported folder",
}


GIB = 1 << 30
# GPU memory of a process that makes a model, and of a family beside what grows with its weights.
MAKING_GIB, FAMILY_GIB = 16.0, 16.0
# Bytes a parameter: the learner's 18 with gradients and optimizer, two of the engine, and room for
# a bucket and the export.
BYTES_OF_PARAMETER = 24


class Rooms:
    """The memory that each GPU has left, in GiB; whoever needs more of it waits."""

    def __init__(self, gpus: int, gib: float) -> None:
        """Begins with `gpus` empty GPUs of `gib` each."""
        self._gib = gib
        self._left = [gib] * gpus
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, gib: float) -> Iterator[int]:
        """Yields a GPU with `gib` left for the block; one that needs more than all has it alone."""
        gib = min(gib, self._gib)
        with self._changed:
            self._changed.wait_for(lambda: max(self._left) >= gib)
            gpu = self._left.index(max(self._left))
            self._left[gpu] -= gib
        try:
            yield gpu
        finally:
            with self._changed:
                self._left[gpu] += gib
                self._changed.notify_all()


def run(command: list[str], log: Path, *, limit_s: float, gpu: int) -> str:
    """Runs a program and all that it starts; returns "" or in a few words how it failed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible([gpu])},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done after {limit_s:g} s"
    return f"exit code {code}" if code else ""


def measure_family(
    name: str, folder: Path, rooms: Rooms, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the figures of one family on one of the GPUs, or how it failed."""
    log, out = folder / "log.txt", folder / "result.json"
    folder.mkdir()
    tiny = [] if arguments.device == "cuda" else ["--tiny"]
    make = [str(HERE / "family_shapes.py"), name, str(folder / "made"), *tiny]
    gap = [str(HERE / "logprob_gap.py"), "--device", arguments.device, "--replies"]
    if arguments.device == "cuda":
        gap += ["--engine", json.dumps(FAMILIES[name].engine)]
    gap += ["--images"] if FAMILIES[name].tower else []
    gap += ["--model", str(folder / "made"), "--steps", str(arguments.steps), "--out", str(out)]
    limit_s = arguments.limit_s
    with rooms.take(MAKING_GIB) as gpu:
        started_s = time.monotonic()
        failure = run([sys.executable, *make], log, limit_s=limit_s, gpu=gpu)
    made = sum(file.stat().st_size for file in (folder / "made").glob("*.safetensors"))
    if not failure:
        # Weights are made in bfloat16.
        with rooms.take(FAMILY_GIB + made / 2 * BYTES_OF_PARAMETER / GIB) as gpu:
            started_s = time.monotonic()
            failure = run([sys.executable, *gap], log, limit_s=limit_s, gpu=gpu)
    found = json.loads(out.read_text()) if out.exists() else {}
    if failure:
        print(f"--- {name}\n{log.read_text(errors='replace')[-12_000:]}", flush=True)
    figures = found.get("figures", {})
    return {"figures": figures, "failure": failure, "seconds": time.monotonic() - started_s}


def lines_of(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the table; a figure of a family stands beside its ratio to that of Qwen3."""
    first = rows.get("qwen3", {}).get("figures", {})

    def cell(figures: dict[str, float], key: str) -> str:
        if key not in figures:
            return "-"
        has_ratio = key == "gap_mean" and first.get(key)
        return f"{figures[key]:.2g}" + (
            f" ({figures[key] / first[key]:.1f} x Qwen3)" if has_ratio else ""
        )

    body = [
        [
            name,
            *(cell(row["figures"], key) for key in COLUMNS),
            f"{row['seconds']:.0f}",
            row["failure"] or "done",
        ]
        for name, row in rows.items()
    ]
    return table(["family", *COLUMNS.values(), "seconds", ""], body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names with commas between")
    parser.add_argument("--steps", type=int, default=3, help="updates before the measurement")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each family")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--gpu-gib", type=float, default=130.0, help="memory of each GPU that families may take"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "families.json")
    arguments = parser.parse_args()
    names = arguments.families.split(",")
    unknown = sorted(set(names) - FAMILIES.keys())
    if unknown:
        parser.error(f"--families must be of {', '.join(FAMILIES)}, got {unknown[0]}")
    on_gpu = arguments.device == "cuda"
    rooms = Rooms(arguments.gpus, arguments.gpu_gib if on_gpu else min(MAKING_GIB, FAMILY_GIB))

    def measured(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return measure_family(name, Path(folder) / "family", rooms, arguments)

    found: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    with ThreadPoolExecutor(len(names)) as pool:
        asked = {pool.submit(measured, name): name for name in names}
        for done in as_completed(asked):
            name = asked[done]
            found[name] = done.result()
            rows = {each: found[each] for each in names if each in found}
            lines = lines_of(rows)
            write_result("families", {"rows": rows, "table": lines}, arguments.out)
            progress(f"{name}: {rows[name]['failure'] or 'done'} ({rows[name]['seconds']:.0f} s)")
    print("\n".join(lines), flush=True)
    return int(any(row["failure"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
