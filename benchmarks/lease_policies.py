"""Compares leases that are granted as early as possible with leases just in time.

    python benchmarks/lease_policies.py --repeats 3

Runs the quickstart with `max_staleness = 4`, both policies in turn, each repeat with another seed.
Prints one table and writes benchmarks/results/lease_policies.json, and a line for each run to
$OUT/lease_policies.jsonl. Takes about six minutes a repeat on two idle cores.

Wasted tokens are those that were generated and neither trained nor evaluated. Times count from the
end of the first step on, so that loading is in none of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Spread, note, part, table, write_result
from quickstart_runs import Run, make_model, run_quickstart

NAME = "lease_policies"
POLICIES = ("eager", "just_in_time")
# The goal counts as reached when the mean reward over this many steps reaches it.
WINDOW = 5
GOAL = 0.9


def figures(run: Run) -> dict[str, float | None]:
    """Returns the figures of one run; `goal_s` is None when it never reached the goal."""
    ledger, by_lag = run.summary["ledger"], run.summary["tokens_by_lag"]
    trained = sum(by_lag.values())
    kept = ledger["trained"] + ledger["evaluated"]
    first_s, last_s = run.rows[0]["wall_s"], run.rows[-1]["wall_s"]
    return {
        "wasted_share": (ledger["generated"] - kept) / ledger["generated"],
        "lag_mean": sum(int(lag) * tokens for lag, tokens in by_lag.items()) / trained,
        "steps_per_min": 60 * (len(run.rows) - 1) / (last_s - first_s),
        "waiting_share": sum(row["waiting_s"] for row in run.rows[1:]) / (last_s - first_s),
        "goal_s": goal_s(run.rows),
        "reward_heldout": run.summary["reward_heldout"],
    }


def goal_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the seconds from the first step until the newest rewards' mean reached the goal."""
    for end in range(WINDOW, len(rows) + 1):
        if statistics.fmean(row["reward_mean"] for row in rows[end - WINDOW : end]) >= GOAL:
            return float(rows[end - 1]["wall_s"] - rows[0]["wall_s"])
    return None


def lines_of(found: Mapping[str, Sequence[Mapping[str, float | None]]]) -> list[str]:
    """Returns the table, with one line for each policy."""
    header = [
        "lease_policy",
        "wasted tokens",
        "mean lag",
        "steps/min",
        "trainer waits",
        f"s to reward {GOAL}",
        "reward held out",
    ]
    forms = [
        ("wasted_share", 1, 100.0, "%"),
        ("lag_mean", 2, 1.0, ""),
        ("steps_per_min", 1, 1.0, ""),
        ("waiting_share", 1, 100.0, "%"),
        ("goal_s", 1, 1.0, ""),
        ("reward_heldout", 3, 1.0, ""),
    ]
    rows = []
    for policy, runs in found.items():
        cells = [f"`{policy}`"]
        for name, digits, scale, unit in forms:
            values = [value for run in runs if (value := run[name]) is not None]
            # A run that never reached the goal must not look like a quick one.
            whole = len(values) == len(runs) and values
            cells.append(Spread.of(values).text(digits, scale) + unit if whole else "-")
        rows.append(cells)
    return table(header, rows)


def main() -> None:
    """Runs both policies in turn, and writes the result after each repeat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float | None]]] = {policy: [] for policy in POLICIES}
    failures: dict[str, str] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder)
        for repeat in range(arguments.repeats):
            for policy in POLICIES:
                with part(f"{policy}, run {repeat + 1}", failures):
                    overrides = [
                        f"run.steps={arguments.steps}",
                        f"run.seed={repeat + 1}",
                        f"algorithm.max_staleness={arguments.max_staleness}",
                        f"algorithm.lease_policy={policy}",
                    ]
                    run = run_quickstart(folder, f"{policy}-{repeat}", overrides)
                    found[policy].append(figures(run))
                    note(NAME, {"policy": policy, "repeat": repeat, **found[policy][-1]})
            lines = lines_of(found)
            print("\n".join(lines), flush=True)
            record = {"found": found, "failures": failures, "table": lines}
            write_result(NAME, record, arguments.out)


if __name__ == "__main__":
    main()
