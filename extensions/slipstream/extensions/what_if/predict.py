"""Says what a run would do with other settings, by its measured lengths and times.

    python -m slipstream.extensions.what_if.predict --folder RUN algorithm.max_staleness=8

Prints what was measured, the same simulated as it is, and the prediction; the difference of the
first two is what predictions are worth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import USAGE_ERROR, ConfigError, SlipstreamError
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.run_folder import CONFIG
from slipstream.core.settings.config import Config
from slipstream.extensions.what_if.measured import MeasuredRun, find_speed, read_run
from slipstream.extensions.what_if.simulation import FleetSizes, Prediction, Simulation

# The settings whose effect the simulation knows.
SETTINGS = (
    "rollout_server.count",
    "rollout_server.max_episodes",
    "algorithm.groups_per_step",
    "algorithm.max_staleness",
)
# Steps of a prediction. The engine is found by fewer steps, of so many episodes at least.
NUM_STEPS = 200
STEPS_FOR_SPEED = (24, 80)
EPISODES_FOR_SPEED = 5000
# Share of the servers' time that pauses for weights may take; engines that rest take more.
MOST_PAUSED = 0.25


def main() -> int:
    """Prints the lines; returns 2, with the cause on stderr, if nothing can be predicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("changes", nargs="+", metavar="section.key=value")
    arguments = parser.parse_args()
    try:
        lines = predict(arguments.folder, arguments.changes)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    print("\n".join(lines))
    return 0


def predict(folder: Path, changes: Sequence[str]) -> list[str]:
    """Returns the lines on a run and what it would do with `changes`.

    Raises ConfigError for a setting that is none of `SETTINGS` or has an invalid value, for a run
    that does what the simulation does not know, and like `read_run`.
    """
    for change in changes:
        name = change.partition("=")[0]
        if name not in SETTINGS:
            raise ConfigError(f"--if takes {', '.join(SETTINGS)}, got {name}")
    config = load_config(folder / CONFIG)
    # A run with other settings would choose another size of its queue.
    changed = load_config(folder / CONFIG, ["queue.max_bytes=1152921504606846976", *changes])
    _check(config)
    measured = read_run(folder, groups_per_step=config.algorithm.groups_per_step)
    if measured.servers_paused > MOST_PAUSED:
        raise ConfigError(
            f"servers paused for {measured.servers_paused:.0%} of their time: engines that share "
            "the learner's GPU in turns are not simulated"
        )
    fleet = _fleet(config)
    fewest, most = STEPS_FOR_SPEED
    per_step = fleet.groups_per_step * measured.work.group_size
    num_steps = min(most, max(fewest, EPISODES_FOR_SPEED // per_step))
    speed = find_speed(measured, fleet, num_steps=num_steps)
    same, other = (
        Simulation(measured.work, speed, sizes, num_steps=NUM_STEPS).run()
        for sizes in (fleet, _fleet(changed))
    )
    return _describe(measured, same, other, changes)


def _check(config: Config) -> None:
    """Raises ConfigError for a run of which the simulation leaves out what decides its speed."""
    if config.controller.client_loop:
        raise ConfigError("a client's own loop orders its steps itself: --if knows leases alone")
    if own_sizes := group_sizes_of(config).of_environments:
        raise ConfigError(
            f"--if simulates groups of one size: {', '.join(sorted(own_sizes))} has its own"
        )
    if config.algorithm.filter != "none":
        raise ConfigError(
            f"algorithm.filter = {config.algorithm.filter!r} leaves groups out, whose lengths the "
            "run has not kept: --if needs runs without it"
        )


def _fleet(config: Config) -> FleetSizes:
    return FleetSizes(
        num_servers=config.rollout_server.count,
        max_episodes=config.rollout_server.max_episodes,
        groups_per_step=config.algorithm.groups_per_step,
        max_staleness=config.algorithm.max_staleness,
    )


def _describe(
    measured: MeasuredRun, same: Prediction, other: Prediction, changes: Sequence[str]
) -> list[str]:
    """Returns a table, and what its error is."""
    columns = (measured, same, other)
    rows = [
        ("", "measured", "simulated", "with " + " ".join(changes)),
        ("tokens a second", *(f"{column.tokens_per_s:,.0f}" for column in columns)),
        ("seconds a step", *(f"{column.step_s:.3g}" for column in columns)),
        ("mean lag", *(f"{column.lag_mean:.2f}" for column in columns)),
        ("trainer waits", *(f"{column.trainer_waits:.0%}" for column in columns)),
        ("servers idle", *(f"{column.servers_idle:.0%}" for column in columns)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    error = same.tokens_per_s / measured.tokens_per_s - 1
    return [
        f"steps {measured.first_step} to {measured.last_step}, and the same lengths and times with "
        "the controller's leases in simulated time:",
        *lines,
        f"as it is, the simulation has {error:+.0%} of the tokens a second that were measured; "
        "speeds of the machine are taken not to change",
    ]


if __name__ == "__main__":
    sys.exit(main())
