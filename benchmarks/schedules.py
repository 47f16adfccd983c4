"""What the best schedule reaches at each bound on the lag, and what ours does, in simulated time.

    python benchmarks/schedules.py

Lengths of replies are lognormal with coefficient of variation 1; the speeds are those of 0.6B on
two H200s. A schedule with known lengths is searched for: how many groups count as long, and for how
many versions in a row these may start. Prints one table and writes
benchmarks/results/schedules.json. Takes some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import RESULTS, Spread, note, progress, settings_of, table, write_result
from schedule_simulation import (
    Machines,
    Schedule,
    Simulation,
    Work,
    bound_s,
    ceiling_s,
    lognormal,
    stratified,
)

LONG_SHARES = (0.08, 0.15)
PULSES = (1, 2)
# The rules that were tried beside ours, and what they show.
CANDIDATES: Mapping[str, Schedule] = {
    "ours": Schedule(),
    "always the next version": Schedule(fresh=True),
    "half of the places": Schedule(max_episodes=128),
    "due groups alone": Schedule(due_first=True),
    "long tasks together, by earlier epochs": Schedule(long_share=0.15, known=False),
}
BEST = "best found with known lengths"
Row = dict[str, float]


def best_known(machines: Machines, work: Work, steps: int) -> Row:
    """Returns the row of the fastest schedule of the search; ours without lengths is among them."""
    shapes = itertools.product(LONG_SHARES, PULSES)
    tried = [Schedule(long_share=share, pulse=pulse) for share, pulse in shapes]
    rows = [row_of(machines, work, schedule, steps) for schedule in (Schedule(), *tried)]
    return min(rows, key=lambda row: row["step_s"])


def row_of(machines: Machines, work: Work, schedule: Schedule, steps: int) -> Row:
    """Returns the figures of one simulated run."""
    found = Simulation(machines, work, schedule).run(steps)
    return {
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "waiting_share": found.waiting_share,
        "open_episodes": found.open_episodes,
    }


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[Row]]]:
    """Returns the rows of all seeds, by bound and schedule."""
    machines = Machines(num_servers=arguments.servers)
    found: dict[str, dict[str, list[Row]]] = {}
    for seed, bound in itertools.product(arguments.seeds, arguments.staleness):
        size = arguments.groups_per_step * arguments.servers
        # A reserve beside the steps: groups that are leased ahead, or held back.
        num_groups = size * (arguments.steps + 4 * (bound + 1))
        if arguments.lengths == "stratified":
            groups = stratified(num_groups)
            expected = [max(group) for group in groups]
        else:
            groups, expected = lognormal(num_groups, seed, by_task=arguments.by_task)
        work = Work(groups, expected, size, bound)
        rows = {
            name: row_of(machines, work, schedule, arguments.steps)
            for name, schedule in CANDIDATES.items()
        }
        rows[BEST] = best_known(machines, work, arguments.steps)
        rows["proved bound"] = {"step_s": bound_s(machines, work)}
        rows["ceiling"] = {"step_s": ceiling_s(machines, work)}
        for name, row in rows.items():
            found.setdefault(str(bound), {}).setdefault(name, []).append(row)
        shown = {name: round(row["step_s"], 3) for name, row in rows.items()}
        note("schedules", {"max_staleness": bound, "seed": seed, **rows})
        progress(f"max_staleness {bound}, seed {seed}: {shown}")
    return found


def share(rows: Mapping[str, Sequence[Row]], name: str, of: str) -> Spread:
    """Returns how near a schedule comes to another one: that one's step over its own."""
    pairs = zip(rows[name], rows[of], strict=True)
    return Spread.of([other["step_s"] / row["step_s"] for row, other in pairs])


def lines_of(found: Mapping[str, Mapping[str, Sequence[Row]]]) -> list[str]:
    """Returns the table, with one line for each bound and schedule."""
    header = ["max_staleness", "schedule", "s/step", "tokens/s", "trainer waits"]
    header += ["of the best found", "of the ceiling"]
    rows: list[list[object]] = []
    for bound, by_name in found.items():
        for name, seeds in by_name.items():
            cells = [Spread.of([row["step_s"] for row in seeds]).text(3), "", ""]
            if "tokens_per_s" in seeds[0]:
                cells[1] = Spread.of([row["tokens_per_s"] for row in seeds]).text(0)
                cells[2] = Spread.of([row["waiting_share"] for row in seeds]).text(2)
            shares = [share(by_name, name, of).text(2) for of in (BEST, "ceiling")]
            rows.append([bound, name, *cells, *shares])
    return table(header, rows)


def main() -> None:
    """Simulates all schedules, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=84)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--groups-per-step", type=int, default=8, help="for each server")
    parser.add_argument(
        "--lengths",
        choices=("lognormal", "stratified"),
        default="lognormal",
        help="stratified: those of benchmarks/asynchrony.py",
    )
    parser.add_argument(
        "--by-task", type=float, default=0.5, help="share of the variance that tasks explain"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "schedules.json")
    arguments = parser.parse_args()
    found = measure(arguments)
    lines = lines_of(found)
    record = {"settings": settings_of(arguments), "results": found, "table": lines}
    write_result("schedules", record, arguments.out)
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
