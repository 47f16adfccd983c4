"""What a run's files say of its lengths, its trainer and its engines.

The seconds of an engine's step are not recorded. They are found by simulating the run as it is: of
the engines whose replies take as long as measured in the mean, the one is taken that comes nearest
to the measured tokens a second and to the paces of short and of long replies, which run on while
others have ended.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.findings import Findings
from slipstream.client.verify import batch_path, read_batch, read_journal
from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import METRICS
from slipstream.core.types import Trajectory
from slipstream.extensions.what_if.simulation import (
    WARM_UP,
    EngineSpeed,
    Episode,
    FleetSizes,
    Prediction,
    Simulation,
    Work,
)
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.v1 import trajectory_pb2

Row: TypeAlias = Mapping[str, Any]
# A group, and the step that has trained it.
StepGroup: TypeAlias = tuple[int, list[Trajectory]]

# The fewest steps of which a run's means are worth a prediction.
LEAST_STEPS = 12
# Shares of an engine's step that depend on no reply, when as many run as in the mean, to choose of;
# and how far beside the best of them a better one is looked for.
FIXED_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FINER = 0.1
# The natural logarithm of the largest factor by which a pace is corrected, and steps of the search.
LARGEST_CORRECTION = 1.0
HALVINGS = 8


@dataclass(frozen=True)
class MeasuredRun:
    """The means of a run's steps behind the warm-up, and what a simulation repeats."""

    work: Work
    first_step: int
    last_step: int
    step_s: float
    tokens_per_s: float
    lag_mean: float
    trainer_waits: float
    servers_idle: float
    servers_paused: float
    # Sampled tokens and seconds in the engine of each episode.
    generation: tuple[tuple[int, float], ...]


def read_run(folder: Path, *, groups_per_step: int) -> MeasuredRun:
    """Returns what the steps of a run behind the warm-up took.

    `groups_per_step` is the run's own. Raises ConfigError for too few steps, or without their
    batches.
    """
    all_rows = _rows(folder / METRICS)
    rows = [row for row in all_rows if {"step", "groups_wait_s"} <= row.keys()]
    if len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"predictions need {LEAST_STEPS} steps, and {folder} has {len(rows)} of this controller"
        )
    num_left_out = max(1, int(WARM_UP * len(rows)))
    all_steps = {int(row["step"]): row for row in rows[num_left_out:]}
    groups: list[list[Episode]] = []
    generation: list[tuple[int, float]] = []
    steps: dict[int, Row] = {}
    for step, members in _groups(folder, all_steps):
        # A step whose batch was removed counts in no mean.
        steps[step] = all_steps[step]
        between_s = float(all_steps[step].get("episode_rest_s_mean", 0.0))
        episodes = []
        for member in members:
            tokens = member.num_sampled_tokens
            rest_s = member.environment_s + between_s
            episodes.append(Episode(tokens, rest_s))
            generation.append((tokens, member.generation_s))
        groups.append(episodes)
    if not groups:
        first_step = min(all_steps)
        last_step = max(all_steps)
        raise ConfigError(
            f"{folder} has no batches of steps {first_step} to {last_step}: predictions need the "
            "lengths of replies, which checkpoint.keep_batches keeps"
        )
    rows = list(steps.values())
    wall_s = sum(row["step_s"] for row in rows)
    waits_s = sum(row["groups_wait_s"] for row in rows)
    of_servers = [row for row in rows if "servers_idle_share" in row]
    num_tokens = sum(tokens for tokens, _ in generation)
    training_s = [row["training_s"] for row in rows]
    other_s = []
    for row in rows:
        busy_s = row["step_s"] - row["groups_wait_s"]
        other_s.append(max(0.0, busy_s - row["training_s"]))
    return MeasuredRun(
        work=Work(
            groups=groups,
            groups_per_step=groups_per_step,
            training_s=training_s,
            other_s=other_s,
            pause_s=statistics.median(row.get("pause_s", 0.0) for row in rows),
        ),
        first_step=min(steps),
        last_step=max(steps),
        step_s=wall_s / len(rows),
        tokens_per_s=num_tokens / wall_s,
        lag_mean=statistics.fmean(row["lag_mean"] for row in rows),
        trainer_waits=waits_s / wall_s,
        servers_idle=_mean(of_servers, "servers_idle_share"),
        servers_paused=_mean(of_servers, "servers_paused_share"),
        generation=tuple(generation),
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows) if rows else 0.0


def _rows(path: Path) -> Iterator[Row]:
    """Yields the rows of metrics.jsonl; the last one may be half written."""
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            return
        yield row


def _groups(folder: Path, steps: Mapping[int, Row]) -> Iterator[StepGroup]:
    """Yields each group of `steps` with its step, as far as their batches are there."""
    for _, _, record in read_journal(folder, Findings()):
        if record.get("kind") != "batch":
            continue
        step = int(record["step"]) + 1
        if step not in steps or not batch_path(folder, record).is_file():
            continue
        members: dict[str, list[Trajectory]] = {}
        for content in read_batch(folder, record):
            if isinstance(content, trajectory_pb2.Trajectory):
                trajectory = trajectory_from_pb(content)
                group = members.setdefault(trajectory.group_id, [])
                # Experts of a batch may take more memory than all else.
                group.append(dataclasses.replace(trajectory, routed_experts=None))
        for group in members.values():
            yield step, group


def pace(generation: Sequence[tuple[int, float]]) -> float:
    """Returns the mean seconds of a token of a reply."""
    all_seconds = sum(seconds for _, seconds in generation)
    all_tokens = sum(tokens for tokens, _ in generation)
    return all_seconds / all_tokens


def by_length(generation: Sequence[tuple[int, float]]) -> float:
    """Returns the pace of the shorter half of the replies, by that of the longer half."""
    ordered = sorted(generation)
    middle = len(ordered) // 2
    shorter = ordered[:middle]
    longer = ordered[middle:]
    return pace(shorter) / pace(longer)


def find_speed(measured: MeasuredRun, fleet: FleetSizes, *, num_steps: int) -> EngineSpeed:
    """Returns the engine with which the run's replies and steps take as long as was measured.

    `fleet` are the run's own sizes. Raises ConfigError if replies took no time.
    """
    mean_s = pace(measured.generation)
    if not mean_s:
        raise ConfigError("the run's replies took no time in the engine, so nothing is predicted")
    num_running = max(1.0, measured.tokens_per_s * mean_s / fleet.num_servers)
    errors: dict[float, tuple[float, EngineSpeed]] = {}

    def best_share(shares: Iterable[float]) -> float:
        for share in shares:
            if 0 <= share <= 1 and share not in errors:
                steady = EngineSpeed(share * mean_s, (1 - share) * mean_s / num_running)
                speed = _scaled(steady, measured, fleet, num_steps=num_steps)
                prediction = Simulation(measured.work, speed, fleet, num_steps=num_steps).run()
                errors[share] = (_error(measured, prediction), speed)
        return min(errors, key=lambda share: errors[share][0])

    near = best_share(FIXED_SHARES)
    best = best_share((near - FINER, near + FINER))
    return errors[best][1]


def _scaled(
    steady: EngineSpeed, measured: MeasuredRun, fleet: FleetSizes, *, num_steps: int
) -> EngineSpeed:
    """Returns the engine that is so many times slower than `steady` that the mean pace is right.

    A slower engine has more replies that run at once, so the pace is searched by halves.
    """
    mean_s = pace(measured.generation)
    fast = -LARGEST_CORRECTION
    slow = LARGEST_CORRECTION
    speed = steady
    for _ in range(HALVINGS):
        scale = math.exp((fast + slow) / 2)
        speed = EngineSpeed(scale * steady.step_s, scale * steady.reply_s)
        prediction = Simulation(measured.work, speed, fleet, num_steps=num_steps).run()
        if pace(prediction.generation) < mean_s:
            fast = math.log(scale)
        else:
            slow = math.log(scale)
    return speed


def _error(measured: MeasuredRun, prediction: Prediction) -> float:
    """Returns how far tokens a second and the paces by length are from what was measured."""
    of_rate = math.log(prediction.tokens_per_s / measured.tokens_per_s)
    of_paces = math.log(by_length(prediction.generation) / by_length(measured.generation))
    return abs(of_rate) + abs(of_paces)
