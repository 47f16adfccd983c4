"""Tables and ratios of the results of `broadcast.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.measure import Spread, table

Row = dict[str, Any]


@dataclass
class Found:
    """All measurements, in the order in which they were made."""

    num_bytes: int = 0
    ours: dict[str, list[Row]] = field(default_factory=lambda: {"idle": [], "busy": []})
    native: dict[str, list[Row]] = field(default_factory=lambda: {"idle": [], "busy": []})
    # Seconds of the limit, on the device and on the host.
    raw_wire: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def summary(found: Found) -> tuple[list[str], dict[str, float]]:
    """Returns the table, and the ratios that are the claim."""
    header = ["what", "GB/s"]
    for name in ("wire", "receive", "end to end"):
        header += [f"{name}, ms", f"{name} of limit"]
    header += ["pause, ms", "pause in wire times", "requests wait, ms"]
    raw = Spread.of(found.raw) if found.raw else None
    raw_wire = Spread.of(found.raw_wire) if found.raw_wire else None
    ratios: dict[str, float] = {}
    rows: list[list[object]] = []

    def of_raw(name: str, spread: Spread) -> str:
        # Like is compared with like: the times of a host include its calls and waits.
        limit = raw_wire if name.endswith(": wire") else raw
        if limit is None:
            return ""
        ratios[f"{name} of raw"] = share = limit.median / spread.median
        return f"{share:.2f}"

    def times(name: str, seconds: Sequence[float]) -> list[str]:
        """Returns the cells of a row; empty cells where a measurement was not timed."""
        if not seconds or min(seconds) <= 0:
            return ["", ""]
        spread = Spread.of(seconds)
        return [spread.text(2, 1000), of_raw(name, spread)]

    def add(name: str, measured: list[Row], *, whole: str, is_ours: bool) -> None:
        # Seconds from all members' start of the first broadcast to the end of the last; 0: nothing
        # was timed. Trainer and servers each count from their own start of the first broadcast, in
        # which they wait for each other (the trainer for the servers' pause). The member that came
        # last has the shortest time. The slowest server receives from its pause until its
        # parameters were checked.
        own = [(row["trainer"], [*row["servers"].values()]) for row in measured if is_ours]
        wire = [
            min((one["wire_s"] for one in (trainer, *servers) if one.get("wire_s")), default=0.0)
            for trainer, servers in own
        ]
        receive = [max((s.get("receive_s", 0.0) for s in each), default=0.0) for _, each in own]
        wholes = Spread.of([row[whole] for row in measured])
        pauses = Spread.of([row["paused_s"] for row in measured])
        ratios[f"{name}: pause_s"] = pauses.median
        cells = times(f"{name}: wire", wire)
        speed = multiple = ""
        if cells[0]:
            wire_s = Spread.of(wire).median
            speed = f"{found.num_bytes / wire_s / 1e9:.1f}"
            ratios[f"{name}: pause in wire times"] = pauses.median / wire_s
            multiple = f"{pauses.median / wire_s:.1f}"
        end_to_end = [wholes.text(1, 1000), of_raw(f"{name}: end to end", wholes)]
        cells += [*times(f"{name}: receive", receive), *end_to_end]
        waits = ""
        if is_ours:
            # The slowest server's pause without the steps under way, which sample tokens.
            pauses_alone = (
                [one["paused_s"] - one.get("steps_s", 0.0) for one in servers] for _, servers in own
            )
            spread = Spread.of([max(each, default=0.0) for each in pauses_alone])
            ratios[f"{name}: wait_s"], waits = spread.median, spread.text(1, 1000)
        rows.append([name, speed, *cells, pauses.text(1, 1000), multiple, waits])

    for load, measured in found.ours.items():
        if measured:
            add(f"ours, {load}", measured, whole="served_s", is_ours=True)
    for load, measured in found.native.items():
        if measured:
            add(f"vLLM's transfer, {load}", measured, whole="whole_s", is_ours=False)
    if raw is not None and raw_wire is not None:
        speed = f"{found.num_bytes / raw_wire.median / 1e9:.1f}"
        limits = [raw_wire.text(2, 1000), "1.00"]
        # A host sees only the whole broadcast, so these two are the same.
        limits += [raw.text(2, 1000), "1.00", raw.text(1, 1000), "1.00"]
        rows.append(["one buffer (limit)", speed, *limits, "", "", ""])
    return table(header, rows), ratios


def stages(found: Found) -> list[str]:
    """Returns a table of the stages of a publish, as trainer and servers measured them."""
    loads = [load for load, measured in found.ours.items() if measured]
    cells = {load: _stages(found.ours[load]) for load in loads}
    names = dict.fromkeys(name for of_load in cells.values() for name in of_load)
    rows = [[name, *(cells[load].get(name, "") for load in loads)] for name in names]
    return table(["stage", *(f"{load}, ms" for load in loads)], rows)


def _stages(measured: list[Row]) -> dict[str, str]:
    values: dict[str, list[float]] = {}
    for row in measured:
        for name in ("started_s", "sent_s", "loaded_s", "serving_s", "finished_s"):
            values.setdefault(f"controller: {name}", []).append(row[name])
        values.setdefault("server: served_s", []).append(row["served_s"])
        for name, value in row["trainer"].items():
            values.setdefault(f"trainer: {name}", []).append(value)
        for server in row["servers"].values():
            for name, value in server.items():
                values.setdefault(f"server: {name}", []).append(value)
    cells = {
        name.removesuffix("_s"): Spread.of(seconds).text(2, 1000)
        for name, seconds in values.items()
        if name.endswith("_s")
    }
    loads = [server.get("copied", 0) for row in measured for server in row["servers"].values()]
    cells["server: loads by copy plan"] = f"{sum(loads):.0f} of {len(loads)}"
    return cells
