r"""What the advisor predicts from one run for other splits and bounds, beside what they do.

A budget of `--budget` machines is split between rollout servers and data-parallel ranks in each way
that leaves one of both, for each bound on the lag. Costs are sleeps: the engine's step, a training
step by its tokens, the publish. The controller is the real one. The profile of one split is
measured first; all predictions are made from it. Predicted and measured lie side by side in the
table.

    PYTHONPATH=tests python -m benchmarks.asynchrony.splits

Writes benchmarks/results/splits.json after each repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from slipstream.client.launch.preflight import free_port
from slipstream.core.advice import profile_from_json, profile_to_json
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.core.step_simulation import Profile, Setting, Simulation
from slipstream.learner.controller.reporting.result_files import read_rows
from support.fakes.timed_fleet import Costs, TimedServer, TimedTrainer

from benchmarks.common.measure import RESULTS, progress, settings_of, table, write_result
from benchmarks.common.rig import SteeredController

WITHIN = 0.10


def config_of(
    arguments: argparse.Namespace, setting: Setting, folder: Path, steps: int, *, seed: int
) -> Config:
    """Returns the settings of one run; the order of its tasks follows from `seed`."""
    return parse_config(
        {
            "run": {"name": "r", "steps": steps, "dir": str(folder), "seed": seed},
            "model": {"path": "nowhere"},
            "algorithm": {
                "group_size": setting.group_size,
                "groups_per_step": arguments.groups_per_step,
                "max_staleness": setting.max_staleness,
                "learning_rate": 1e-3,
            },
            "sampling": {"max_reply_tokens": 512, "max_episode_tokens": 1024},
            "learner": {"world_size": setting.replicas},
            "controller": {
                "address": f"127.0.0.1:{free_port('127.0.0.1')}",
                "heartbeat_s": Costs().slower(arguments.slower).heartbeat_s,
                "heartbeat_timeout_s": 60.0,
            },
            "environments": [{"name": "e", "reference": "m:E"}],
        },
        source="the benchmark",
    )


@dataclass(frozen=True)
class Played:
    """A run: the rows of its steps, and the profile that it measured."""

    rows: list[dict[str, float]]
    profile: Profile | None
    # Mean seconds by which the machine woke the run too late from a sleep.
    late_s: float

    def means(self, setting: Setting, steps: int) -> dict[str, float]:
        """Steps per second, and parts of a step, of `steps` after the first rounds of the bound."""
        first = warmup(setting)
        counted = self.rows[first : first + steps]
        parts = ("step_s", "training_s", "groups_wait_s", "publish_s")
        means = {name: statistics.fmean(row[name] for row in counted) for name in parts}
        return {"measured": 1 / means["step_s"], **means, "late_s": self.late_s}


def warmup(setting: Setting) -> int:
    """Returns the steps before those that count."""
    return 2 * (setting.max_staleness + 1) + 1


async def note_lateness(lateness: list[float]) -> None:
    """Adds by how many seconds each of many sleeps was too long, until it is cancelled."""
    while True:
        started_s = time.monotonic()
        await asyncio.sleep(0.5)
        lateness.append(time.monotonic() - started_s - 0.5)


async def play(
    arguments: argparse.Namespace,
    setting: Setting,
    steps: int,
    *,
    seed: int = 0,
    limit_s: float = 3600.0,
) -> Played:
    """Runs `steps` steps under `setting`."""
    costs = Costs().slower(arguments.slower)
    # A disk that others use would be measured too.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        config = config_of(arguments, setting, Path(name), steps, seed=seed)
        controller = SteeredController(config)
        address = config.controller.address
        trainer = TimedTrainer(address, costs, replicas=setting.replicas)
        servers = [
            TimedServer(address, f"server-{k}", costs, max_episodes=arguments.max_episodes)
            for k in range(setting.servers)
        ]
        running = asyncio.create_task(controller.run())
        lateness: list[float] = []
        late = asyncio.create_task(note_lateness(lateness))
        tasks = [asyncio.create_task(each.run()) for each in (*servers, trainer)]
        try:
            async with asyncio.timeout(limit_s):
                await running
            # The servers' streams end with the controller.
            await asyncio.wait(tasks, timeout=10.0)
        finally:
            for task in (*tasks, running, late):
                task.cancel()
            await asyncio.gather(*tasks, running, late, return_exceptions=True)
        rows = list(read_rows(config.run_dir / "metrics.jsonl"))
        path = config.run_dir / "advice.json"
        table = json.loads(path.read_text()) if path.exists() else None
        profile = None if table is None else profile_from_json(table["profile"])
    return Played([row for row in rows if "step" in row], profile, statistics.fmean(lateness))


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """Returns each chosen split under each bound; the bounds take turns."""
    servers = arguments.servers or range(1, arguments.budget)
    splits = [(number, arguments.budget - number) for number in servers]
    return [
        Setting(servers, replicas, bound, arguments.group_size)
        for servers, replicas in splits
        for bound in arguments.staleness
    ]


def row_of(profile: Profile, setting: Setting, runs: list[dict[str, float]]) -> dict[str, float]:
    """Returns what several runs under a setting measured, and what the profile predicts."""
    means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    measured = [run["measured"] for run in runs]
    started_s = time.perf_counter()
    predicted = Simulation(profile, setting).run()
    return {
        "servers": setting.servers,
        "ranks": setting.replicas,
        "max_staleness": setting.max_staleness,
        **means,
        "least": min(measured),
        "greatest": max(measured),
        "predicted": predicted.steps_per_s,
        "predicted_waiting": predicted.waiting_share,
        "error": predicted.steps_per_s / means["measured"] - 1,
        "simulated_s": time.perf_counter() - started_s,
    }


def write(
    arguments: argparse.Namespace, profile: Profile, found: list[dict[str, float]]
) -> list[str]:
    """Writes the result as far as it is known; returns its table."""
    rows = sorted(found, key=lambda row: (row["max_staleness"], row["servers"]))
    best = {
        (kind, bound): max(
            (row for row in rows if row["max_staleness"] == bound), key=lambda row: row[kind]
        )
        for kind in ("measured", "predicted")
        for bound in {row["max_staleness"] for row in rows}
    }
    cells: list[list[object]] = []
    for row in rows:
        bound = row["max_staleness"]
        marks = " and ".join(kind for kind in ("measured", "predicted") if best[kind, bound] is row)
        cells.append(
            [
                *(f"{row[name]:.0f}" for name in ("max_staleness", "servers", "ranks")),
                f"{row['measured']:.3f} ({row['least']:.3f}-{row['greatest']:.3f})",
                f"{row['predicted']:.3f}",
                f"{row['error']:+.1%}",
                f"{row['groups_wait_s'] / row['step_s']:.0%}, {row['predicted_waiting']:.0%}",
                f"best {marks}" if marks else "",
            ]
        )
    header = [
        "max_staleness",
        "servers",
        "ranks",
        "steps/s",
        "predicted",
        "error",
        "trainer waits",
        "",
    ]
    lines = table(header, cells)
    wrong = [row for row in rows if abs(row["error"]) > WITHIN]
    missed = [b for k, b in best if k == "measured" and best[k, b] is not best["predicted", b]]
    lines += [
        "",
        f"{len(rows) - len(wrong)} of {len(rows)} within {WITHIN:.0%}; the best split was named "
        f"for {len(best) // 2 - len(missed)} of {len(best) // 2} bounds",
    ]
    record = {"settings": settings_of(arguments), "results": rows, "table": lines}
    costs = {name: v for name, v in profile_to_json(profile).items() if name != "groups"}
    more = {"profile": {**costs, "num_groups": len(profile.groups)}}
    write_result("splits", {**record, **more}, arguments.out or RESULTS / "splits.json")
    return lines


async def measure(arguments: argparse.Namespace) -> list[str]:
    """Runs the base and all settings side by side; returns the table."""
    base = Setting(
        arguments.base_servers,
        arguments.budget - arguments.base_servers,
        arguments.base_staleness,
        arguments.group_size,
    )

    async def one(setting: Setting, steps: int, seed: int) -> Played:
        # The last steps of a run train the long replies that all steps have left behind.
        rest = setting.max_staleness + 2
        played = await play(arguments, setting, warmup(setting) + steps + rest, seed=seed)
        progress(f"{setting}: {played.means(setting, steps)}")
        return played

    chosen = settings(arguments)
    runs: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in chosen}
    profile: Profile | None = None
    lines: list[str] = []
    # Each repeat has an order of tasks of its own: which long replies meet in a step decides much.
    for seed in range(arguments.repeats):
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(one(base, arguments.base_steps, seed))
            others = [tasks.create_task(one(each, arguments.steps, seed)) for each in chosen]
        # Only the first run of the base predicts.
        profile = profile or first.result().profile
        if profile is None:
            raise SystemExit("the base run was too short for a profile: give more --base-steps")
        for setting, other in zip(chosen, others, strict=True):
            runs[setting].append(other.result().means(setting, arguments.steps))
        lines = write(arguments, profile, [row_of(profile, *pair) for pair in runs.items()])
    return lines


def main() -> None:
    """Prints the table, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--budget", type=int, default=7)
    parser.add_argument("--servers", type=int, nargs="+", help="of the splits; default: all")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--base-servers", type=int, default=3)
    parser.add_argument("--base-staleness", type=int, default=2)
    parser.add_argument("--base-steps", type=int, default=44)
    parser.add_argument("--steps", type=int, default=24, help="of a run, after its first rounds")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--max-episodes", type=int, default=64)
    parser.add_argument("--slower", type=float, default=8.0, help="factor of all costs")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print("\n".join(uvloop.run(measure(arguments))), flush=True)


if __name__ == "__main__":
    main()
