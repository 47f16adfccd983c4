r"""Measures publishes of what a step changed against whole ones, with both real ends of the wire.

The sender takes real steps of AdamW on float32 masters and rounds them to bfloat16. The code of the
learner finds, encodes and sends what changed; that of the rollout server applies it to parameters
that are fused as vLLM's are. Every publish is compared by the digests of the whole content, and at
the end the bits of all parameters.

    python -m benchmarks.weights.delta --device cuda --shape 8B --servers 3
    python -m benchmarks.weights.delta --device cuda --shape 8B --servers 3 --delta host
    python -m benchmarks.weights.delta            # tiny, over gloo

Prints one table and writes benchmarks/results/delta-SHAPE-SERVERS-PLACE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from slipstream.core.settings.config import WeightsSection

from benchmarks.common.measure import (
    RESULTS,
    Spread,
    note,
    part,
    progress,
    settings_of,
    table,
    write_result,
)
from benchmarks.common.shapes import SHAPES
from benchmarks.weights.wire import DELAY_S, Ends, check, times_of, work_of

ROWS = {"whole": "everything", "delta": "changes"}
Found = dict[str, list[dict[str, float]]]


async def measure(arguments: argparse.Namespace, logs: Path) -> Found:
    """Returns the figures of both kinds of publish, in turns; the first round only warms up."""
    found: Found = {name: [] for name in ROWS}
    ends = await Ends.start(arguments, logs)
    try:
        announced = await ends.join()
        progress(f"all have met; {announced['num_bytes']} bytes")
        for repeat in range(arguments.repeats + 1):
            for name in ROWS:
                await ends.all(do="step", lr=arguments.learning_rate)
                prepared = (await ends.all(do="prepare"))[0]
                payload = prepared["delta"] if name == "delta" else ""
                answers = await ends.all(do="publish", delay_s=DELAY_S, delta=payload)
                check(answers)
                row = times_of(answers) | work_of(prepared)
                row |= {"changed": prepared["changed"], "num_bytes": answers[0]["num_bytes"]}
                note(arguments.name, {"what": name, "repeat": repeat, **row})
                found[name] += [row] if repeat else []
        check(await ends.all(do="sums"))
    finally:
        await ends.close()
    return found


def summary(found: Found) -> tuple[list[str], dict[str, float]]:
    """Returns the table, and the ratios that are the claim."""
    medians = {
        name: {key: Spread.of([row[key] for row in rows]).median for key in rows[0]}
        for name, rows in found.items()
        if rows
    }
    rows: list[list[object]] = []
    for name, row in medians.items():
        cells: list[object] = [ROWS[name], f"{row['num_bytes'] / 1e6:.2f}"]
        cells += [f"{100 * row['changed']:.2f}"]
        for key in ("digests_s", "wire_s", "host_s"):
            cells.append(Spread.of([each[key] for each in found[name]]).text(3, 1000))
        rows.append(cells)
    header = ["what travels", "MB", "changed elements, %", "digests and finding, ms", "wire, ms"]
    header += ["with copies or changes applied, on the host, ms"]
    ratios: dict[str, float] = {}
    if len(medians) == len(ROWS):
        keys = {"num_bytes": "bytes", "host_s": "time"}
        ratios = {
            f"{what} of a whole publish": medians["delta"][key] / medians["whole"][key]
            for key, what in keys.items()
        }
    return table(header, rows), ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bucket-mib", type=int, default=WeightsSection().bucket_mib)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--delta", choices=("gpu", "host"), default="gpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.name = f"delta-{arguments.shape}-{arguments.servers}-{arguments.delta}"
    found: Found = {name: [] for name in ROWS}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        with part("deltas", failures):
            found = asyncio.run(measure(arguments, Path(folder)))
        if failures:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    lines, ratios = summary(found)
    record = {"settings": settings_of(arguments), "ratios": ratios, "table": lines}
    record |= {"measured": found, "failures": failures}
    write_result(arguments.name, record, arguments.out or RESULTS / f"{arguments.name}.json")
    print("\n".join([*lines, "", str(ratios)]), flush=True)
    if failures:
        raise SystemExit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
