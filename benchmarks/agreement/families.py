r"""Takes every family of models through three steps, and compares learner and server.

Each family is a random model of its own: at true width with few layers on a GPU, tiny on a CPU.
`logprob_gap.py` trains it in processes of its own, with a time limit; a mixture replays the
engine's experts in the steps between. A family that fails leaves a row with the reason; `--logs`
keeps its logs.

    python -m benchmarks.agreement.families --device cuda
    python -m benchmarks.agreement.families --device cuda --gpus 2 --no-fresh --logs FOLDER
    python -m benchmarks.agreement.families --families qwen3,gpt-oss
    python -m benchmarks.agreement.families --device cuda --families qwen3:float16,qwen3:bits

On a GPU machine learner and server of a family share one GPU. A family begins once a GPU has room
for it beside others, the largest first: no figure here is a time. Prints one table at the end, with
Qwen3 first; benchmarks/results/families.json is written after each family. Rows that are there
from an earlier call on the same kind of device stay: `--families` measures some of them anew.
A type of numbers that a family refuses leaves a row with the refusal.
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

from slipstream.core.machine.process import die_with_parent

from benchmarks.agreement.family_shapes import FAMILIES, count_parameters
from benchmarks.agreement.logprob_gap import DTYPES
from benchmarks.common.measure import RESULTS, program, progress, table, visible, write_result

COLUMNS = {
    "kl_k3": "KL (k3)",
    "gap_mean": "gap, mean",
    "gap_max": "gap, max",
    "clip_fraction": "tokens clipped",
    "gap_mean_at_start": "gap before updates",
    "replayed_gap_mean": "gap with router replay",
    "routing_difference": "experts that differ",
    "fresh_gap_max": "exported folder",
}


def row_name(name: str, dtype: str) -> str:
    """Returns the name of a family's row; rows in bfloat16 have the family's name."""
    return name if dtype == "bfloat16" else f"{name}, {dtype}"


GIB = 1 << 30
# GPU memory of a family beside what grows with its weights.
FAMILY_GIB = 7.0
# Bytes a parameter: the learner's 18 with gradients and optimizer, two of the engine, and room for
# a layer that arrives.
BYTES_OF_PARAMETER = 22
# All rows that a table may have, in its order.
ALL_ROWS = [row_name(name, dtype) for name in FAMILIES for dtype in DTYPES]
# A line of the table shows so much of a reason.
LONGEST_REASON = 200


class Rooms:
    """The memory that each GPU has left, in GiB; whoever needs more of it waits."""

    def __init__(self, gpus: int, gib: float, at_once: int) -> None:
        """Begins with `gpus` empty GPUs of `gib` each, for `at_once` families on all of them."""
        self._gib = gib
        self._left = [gib] * gpus
        self._places = at_once
        self._waiting: list[float] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, gib: float) -> Iterator[int]:
        """Yields a GPU with `gib` left for the block, where no larger one that waits fits.

        One that needs more than all has a GPU alone.
        """
        gib = min(gib, self._gib)
        with self._changed:
            self._waiting.append(gib)
            self._changed.wait_for(lambda: self._next() == gib)
            self._waiting.remove(gib)
            gpu = self._left.index(max(self._left))
            self._left[gpu] -= gib
            self._places -= 1
            self._changed.notify_all()
        try:
            yield gpu
        finally:
            with self._changed:
                self._left[gpu] += gib
                self._places += 1
                self._changed.notify_all()

    def _next(self) -> float:
        """Returns the largest room that is waited for and left; 0 if there is none."""
        fitting = (gib for gib in self._waiting if gib <= max(self._left))
        return max(fitting, default=0.0) if self._places else 0.0


def run(command: list[str], log: Path, *, limit_s: float, gpu: int) -> str:
    """Runs a program and all that it starts; returns "" or in a few words how it failed.

    It ends with this process, and what it leaves in temporary folders lies beside `log`.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible([gpu]), "TMPDIR": str(log.parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done after {limit_s:g} s"
    return f"exit code {code}" if code else ""


def measure_family(
    name: str, dtype: str, folder: Path, gpu: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the figures of one family in `dtype` on GPU `gpu`, or how it failed.

    All logs of one that failed become a file of the folder `arguments.logs`, if it is told.
    """
    folder.mkdir()
    log = folder / "log.txt"
    out = folder / "result.json"
    started_s = time.monotonic()
    tiny = [] if arguments.device == "cuda" else ["--tiny"]
    command = [*program("agreement.family_shapes"), name, str(folder / "made"), *tiny]
    failure = run(command, log, limit_s=arguments.limit_s, gpu=gpu)
    found: dict[str, Any] = {}
    if not failure:
        command = [*program("agreement.logprob_gap"), "--device", arguments.device, "--replies"]
        command += ["--model", str(folder / "made"), "--steps", str(arguments.steps)]
        command += ["--dtype", dtype, "--out", str(out)]
        if arguments.device == "cuda":
            command += ["--engine", json.dumps(FAMILIES[name].engine)]
        command += ["--images"] if FAMILIES[name].tower else []
        command += ["--replay"] if FAMILIES[name].replays else []
        command += [] if arguments.fresh else ["--no-fresh"]
        failure = run(command, log, limit_s=arguments.limit_s, gpu=gpu)
        found = json.loads(out.read_text()) if out.exists() else {}
        if failure:
            (cause, *_) = *found.get("failures", {}).values(), log.read_text(errors="replace")
            said = cause.strip().split("\n")[-1]
            failure = f"{failure}: {said}"[:LONGEST_REASON]
    if failure:
        row = row_name(name, dtype)
        print(f"--- {row}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
        if arguments.logs is not None:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            with (arguments.logs / f"{row}.log").open("w") as file:
                for each in [*sorted(folder.rglob("logs/*.log")), log]:
                    file.write(f"--- {each.name}\n{each.read_text(errors='replace')}\n")
    seconds = time.monotonic() - started_s
    return {"figures": found.get("figures", {}), "failure": failure, "seconds": seconds}


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
            row["measured"],
            row["failure"].replace("|", "/") or "done",
        ]
        for name, row in rows.items()
    ]
    return table(["family", *COLUMNS.values(), "seconds", "measured", ""], body)


def earlier_rows(path: Path, *, device: str, steps: int) -> dict[str, dict[str, Any]]:
    """Returns the rows of earlier calls whose result lies at `path`, if they measured the same."""
    record = json.loads(path.read_text()) if path.exists() else {}
    if (record.get("device"), record.get("steps")) != (device, steps):
        return {}
    return {name: row for name, row in record["rows"].items() if name in ALL_ROWS}


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line; `rows` are (family, type) in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--families", default=",".join(FAMILIES), help="NAME or NAME:TYPE, with commas between"
    )
    parser.add_argument("--steps", type=int, default=3, help="updates before the measurement")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each program of a family")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--gpu-gib", type=float, default=134.0, help="memory of each GPU that families may take"
    )
    parser.add_argument("--at-once", type=int, default=6, help="families on all GPUs together")
    parser.add_argument(
        "--fresh",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with an engine that loads the exported folder, too",
    )
    parser.add_argument("--logs", type=Path, help="a folder for the logs of families that failed")
    parser.add_argument("--out", type=Path, default=RESULTS / "families.json")
    arguments = parser.parse_args()
    arguments.rows = [
        (name, dtype or "bfloat16")
        for name, _, dtype in (case.partition(":") for case in arguments.families.split(","))
    ]
    for name, dtype in arguments.rows:
        if name not in FAMILIES or dtype not in DTYPES:
            parser.error(
                f"--families must be of {', '.join(FAMILIES)}, each with nothing or one of "
                f"{', '.join(DTYPES)} behind a colon, got {name}:{dtype}"
            )
    return arguments


def main() -> int:
    arguments = parse_arguments()
    cases = arguments.rows
    kind = {"device": arguments.device, "steps": arguments.steps}
    on_gpu = arguments.device == "cuda"
    rooms = Rooms(arguments.gpus, arguments.gpu_gib, arguments.at_once if on_gpu else 1)
    sizes = {name: count_parameters(name, tiny=not on_gpu) for name, _ in cases}
    progress(f"{sum(sizes.values()) / 1e9:.1f} billion parameters in {len(sizes)} families")

    def measured(name: str, dtype: str) -> dict[str, Any]:
        gib = FAMILY_GIB + sizes[name] * BYTES_OF_PARAMETER / GIB
        with rooms.take(gib) as gpu, tempfile.TemporaryDirectory() as folder:
            return measure_family(name, dtype, Path(folder) / "family", gpu, arguments)

    found = earlier_rows(arguments.out, **kind)
    lines = lines_of(found)
    with ThreadPoolExecutor(len(cases)) as pool:
        # Rooms are taken in this order; later the smaller ones fill what is left.
        largest_first = sorted(cases, key=lambda case: -sizes[case[0]])
        asked = {pool.submit(measured, *case): row_name(*case) for case in largest_first}
        for done in as_completed(asked):
            name = asked[done]
            found[name] = done.result() | {"measured": time.strftime("%Y-%m-%d %H:%M")}
            rows = {each: found[each] for each in ALL_ROWS if each in found}
            lines = lines_of(rows)
            write_result("families", {**kind, "rows": rows, "table": lines}, arguments.out)
            progress(f"{name}: {rows[name]['failure'] or 'done'} ({rows[name]['seconds']:.0f} s)")
    print("\n".join(lines), flush=True)
    return int(any(found[row]["failure"] for row in asked.values()))


if __name__ == "__main__":
    sys.exit(main())
