"""Implements `slipstream replay` and `slipstream bisect`, which train recorded steps again.

All ranks run on this machine, wherever those of the run were. A command checks its settings and the
run's folder before a rank starts. It returns its exit code after the end of all ranks, or raises
ConfigError or RunFailed with the cause.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slipstream.client import run_folder
from slipstream.client.launch.check import Stage
from slipstream.client.launch.checks import require
from slipstream.client.launch.children import (
    first_failed,
    rank_environments,
    show_lines,
    start_child,
)
from slipstream.client.launch.placement import place_here
from slipstream.client.launch.run_processes import GRACE_S
from slipstream.client.launch.scene import Scene
from slipstream.core.configuration.config_file import load_config
from slipstream.core.configuration.replayed_settings import (
    comparison_problems,
    places_and_training,
    trial_problems,
)
from slipstream.core.errors import ConfigError
from slipstream.core.recorded_metrics import MetricCondition, recorded_metrics, step_of
from slipstream.core.run_folder import BATCHES, JOURNAL, log_path
from slipstream.core.settings.config import Config

REPLAY = "slipstream.learner.trainer.replay"
BISECT = "slipstream.learner.trainer.bisect"
_THIS_MACHINE = 'learner.master="127.0.0.1:0"'


async def run_replay(
    folder: Path,
    overrides: Sequence[str],
    *,
    first: int | None,
    last: int | None,
) -> int:
    """Runs `slipstream replay`, from step `first` to `last` if they are set.

    Returns 0 if the run's own settings give the recorded digests, else 1.
    """
    path = run_folder.settings_of(folder)
    places, training = places_and_training(overrides)
    places = [_THIS_MACHINE, *places]
    config = load_config(path, places)
    changed = load_config(path, [*places, *training])
    await require(Scene(config, frozenset({"replay"})), Stage.SETTINGS)
    _check_recorded(folder, is_whole=first is None)
    arguments: list[str] = []
    if training:
        for problem in comparison_problems(config, changed):
            raise ConfigError(problem)
    if changed != config:
        arguments.extend(f"--other={setting}" for setting in training)
    if first is not None:
        arguments.append(f"--from={first}")
    if last is not None:
        arguments.append(f"--to={last}")
    return await _run_ranks(
        config,
        folder,
        REPLAY,
        [*places, *arguments],
        shown_prefix="version ",
    )


async def run_bisect(
    folder: Path,
    overrides: Sequence[str],
    *,
    metric: str,
    step: int | None,
    first: int | None,
) -> int:
    """Runs `slipstream bisect`; returns 0 if it names a group, 1 if nothing can be concluded.

    `metric` is a condition such as `loss > 3`. Without `step` it is that of the first step in which
    the condition holds; `first` is the first step whose groups are suspects.
    """
    path = run_folder.settings_of(folder)
    places, training = places_and_training(overrides)
    if training:
        settings = " ".join(setting for setting in overrides if setting in training)
        raise ConfigError(f"bisect trains by the run's own settings, got {settings}")
    places = [_THIS_MACHINE, *places]
    config = load_config(path, places)
    for problem in trial_problems(config):
        raise ConfigError(problem)
    condition = MetricCondition.parse(metric)
    broken_step = step_of(condition, recorded_metrics(folder), step=step)
    if first is not None and not 1 <= first <= broken_step:
        raise ConfigError(f"--from must be 1 to {broken_step}, the step of the metric, got {first}")
    await require(Scene(config, frozenset({"replay"})), Stage.SETTINGS)
    _check_recorded(folder, is_whole=False)
    arguments = [f"--metric={condition}", f"--step={broken_step}"]
    if first is not None:
        arguments.append(f"--from={first}")
    return await _run_ranks(
        config,
        folder,
        BISECT,
        [*places, *arguments],
        shown_prefix="bisect: ",
    )


def _check_recorded(folder: Path, *, is_whole: bool) -> None:
    """Raises ConfigError without a journal, or for a whole replay without the first batch."""
    journal = folder / JOURNAL
    if not journal.is_dir():
        raise ConfigError(f"{folder} has no journal")
    if not is_whole:
        return
    first_batches = journal.joinpath(BATCHES).glob("step-000000*.pb")
    if not any(first_batches):
        raise ConfigError(
            f"{folder} does not hold the first step's batch, with which a replay begins: no step "
            "began, or it was removed (checkpoint.keep_batches); --from STEP begins with a "
            "checkpoint"
        )


async def _run_ranks(
    config: Config,
    folder: Path,
    program: str,
    arguments: Sequence[str],
    *,
    shown_prefix: str,
) -> int:
    """Runs all ranks of a program that trains recorded steps; returns 0 or 1, as rank 0 does.

    Prints the lines of rank 0 that begin with `shown_prefix`. Raises RunFailed if a rank fails.
    """
    path = run_folder.settings_of(folder)
    world_size = config.learner.world_size
    placement = place_here(config, ranks=world_size)
    ranks = []
    for torchrun in rank_environments(config, range(world_size)):
        environ = torchrun | placement.learner_environment
        name = f"replay-rank-{environ['RANK']}"
        log = log_path(folder, name)
        log.unlink(missing_ok=True)
        rank = await start_child(
            name,
            program,
            ["--config", str(path), *arguments],
            log_path=log,
            environ=environ,
        )
        ranks.append(rank)
    ended = asyncio.Event()
    lines = show_lines(ranks[0].log_path, shown_prefix, ended)
    show = asyncio.ensure_future(lines)
    try:
        failed = await first_failed(ranks, fine=(0, 1))
    finally:
        await asyncio.gather(*(rank.stop(GRACE_S) for rank in ranks))
        ended.set()
        await show
    if failed is not None:
        raise failed.failure()
    return int(any(rank.process.returncode for rank in ranks))
