r"""Measures the wire of a publish alone, in seconds, with its real two ends: no trainer, no engine.

The code of the learner and of the rollout server fills, broadcasts, digests and copies the buckets;
only the parameters are made up. The limit is one broadcast of as many bytes in one buffer, which
takes turns with the buckets and is timed in the same way.

    python -m benchmarks.weights.wire --device cuda --shape 0.6B
    python -m benchmarks.weights.wire --device cuda --shape 8B --servers 3 --bucket-mib 64
    python -m benchmarks.weights.wire            # tiny, over gloo, without the limit

Prints one table and writes benchmarks/results/wire-SHAPE-SERVERS.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from slipstream.core.settings.sections import WeightsSection

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
from benchmarks.weights.broadcast_programs import START_LIMIT_S, Program

# Seconds by which receivers come later than the sender, as servers do that must pause.
DELAY_S = 0.01
# Work of the sender before a publish: at the end of a step, and while the step is reported.
BEFORE = {"digests_s": "the pass for the digests", "ahead_s": "putting the first buckets together"}


class Ends:
    """A sender on the first GPU and receivers on the next ones."""

    def __init__(self, programs: list[Program]) -> None:
        self._programs = programs

    @classmethod
    async def start(cls, arguments: argparse.Namespace, logs: Path) -> Ends:
        """Starts all programs; returns when all have their parameters."""
        common = ["--device", arguments.device, "--shape", arguments.shape]
        common += ["--bucket-mib", str(arguments.bucket_mib)]
        programs = []
        for rank in range(1 + arguments.servers):
            role = "receiver" if rank else "sender"
            programs.append(
                await Program.start(
                    [role, *common, "--rank", str(rank)],
                    (rank,),
                    logs / f"{role}-{rank}.log",
                    on_gpu=arguments.device == "cuda",
                    module="weights.wire_ends",
                )
            )
        ends = cls(programs)
        await asyncio.gather(*(program.get(START_LIMIT_S) for program in programs))
        return ends

    async def all(self, **message: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
        """Sends a message to all programs; returns the answers of sender and receivers."""
        for program in self._programs:
            program.put(**message)
        return await asyncio.gather(*(program.get() for program in self._programs))

    async def join(self) -> dict[str, Any]:
        """Joins all programs; returns the sender's announcement."""
        sender = self._programs[0]
        sender.put(do="announce", world_size=len(self._programs))
        announced = await sender.get()
        await self.all(do="join", **announced)
        return announced

    async def close(self) -> None:
        """Ends all programs."""
        await asyncio.gather(*(program.close() for program in self._programs))


def check(answers: list[dict[str, Any]]) -> None:
    """Raises RuntimeError unless all programs have the same bits."""
    key = "sums" if "sums" in answers[0] else "digests"
    if any(answer[key] != answers[0][key] for answer in answers):
        raise RuntimeError(f"a receiver has other {key} than the sender")


def times_of(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the seconds on the wire since all had come, and those until the last host knows."""
    wires = [answer["wire_s"] for answer in answers if answer["wire_s"]]
    return {"wire_s": min(wires), "host_s": max(answer["host_s"] for answer in answers[1:])}


def work_of(answer: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of the sender's work before a publish."""
    return {key: answer[key] for key in BEFORE}


async def measure(arguments: argparse.Namespace, logs: Path, found: dict[str, Any]) -> None:
    """Adds times of ours and of the limit, in turns, to `found`; the first round only warms up."""
    ends = await Ends.start(arguments, logs)
    try:
        announced = await ends.join()
        num_bytes = announced["num_bytes"]
        found |= {"num_bytes": num_bytes, "num_buckets": announced["num_buckets"]}
        progress(f"all have met; {num_bytes} bytes in {announced['num_buckets']} buckets")
        for repeat in range(arguments.repeats + 1):
            before = work_of((await ends.all(do="prepare"))[0])
            answers = {"ours": await ends.all(do="publish", delay_s=DELAY_S)}
            check(answers["ours"])
            if arguments.device == "cuda":
                answers["raw"] = await ends.all(do="raw", delay_s=DELAY_S, num_bytes=num_bytes)
            for name, row in answers.items():
                times = times_of(row) | (before if name == "ours" else {})
                note(arguments.name, {"what": name, "repeat": repeat, **times})
                found[name] += [times] if repeat else []
        check(await ends.all(do="sums"))
    finally:
        await ends.close()


def summary(found: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """Returns the table, and the ratios that are the claim."""
    rows: list[list[object]] = []
    ratios: dict[str, float] = {}
    for name, what in (("ours", "ours"), ("raw", "one buffer (limit)")):
        if not found[name]:
            continue
        cells: list[object] = [what]
        for key in ("wire_s", "host_s"):
            spread = Spread.of([row[key] for row in found[name]])
            share = ""
            if found["raw"]:
                ratio = Spread.of([row[key] for row in found["raw"]]).median / spread.median
                share = f"{ratio:.3f}"
                if name == "ours":
                    ratios[f"{key} of raw"] = ratio
            cells += [spread.text(3, 1000), share]
        rate = found["num_bytes"] / Spread.of([r["wire_s"] for r in found[name]]).median / 1e9
        rows.append([cells[0], f"{rate:.1f}", *cells[1:]])
    header = ["what", "GB/s", "wire, ms", "wire of limit"]
    header += ["with copies, on the host, ms", "host of limit"]
    before = [
        f"{what} {Spread.of([row[key] for row in found['ours']]).text(3, 1000)} ms"
        for key, what in BEFORE.items()
        if all(key in row for row in found["ours"])
    ]
    notes = [f"Before a publish: {', '.join(before)}."] if before else []
    return [*table(header, rows), *notes], ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bucket-mib", type=int, default=WeightsSection().bucket_mib)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.name = f"wire-{arguments.shape}-{arguments.servers}"
    found: dict[str, Any] = {"ours": [], "raw": []}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        with part("the wire", failures):
            asyncio.run(measure(arguments, Path(folder), found))
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
