"""Carries out what extensions make of a run's folder: `slipstream export`, and predictions."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.client import run_folder
from slipstream.client.launch.launcher import run_export, run_program
from slipstream.client.terminal import say
from slipstream.core.errors import USAGE_ERROR, ConfigError
from slipstream.core.extension import program
from slipstream.core.run_folder import log_path

# The word for a table in place of a tracker, and its file in the run's folder.
TABLE = "csv"
TABLE_FILE = "metrics.csv"


async def run_export_command(arguments: argparse.Namespace) -> int:
    """Exports what the options name; raises ConfigError for options that contradict each other."""
    out: Path | None = arguments.rollouts
    if out is None:
        for option, value in (
            ("--steps", arguments.steps),
            ("--min-reward", arguments.min_reward),
        ):
            if value is not None:
                raise ConfigError(f"{option} chooses rollouts: name a file by --rollouts")
        if arguments.metrics is not None:
            return await _export_metrics(arguments)
        return await run_export(arguments.folder, arguments.step, arguments.out)
    for option, value in (("--step", arguments.step), ("--out", arguments.out)):
        if value is not None:
            raise ConfigError(
                f"{option} is of a checkpoint and --rollouts of a data set: call export for each"
            )
    if arguments.metrics is not None:
        raise ConfigError("--metrics and --rollouts write different files: call export for each")
    return await _export_rollouts(arguments, out)


async def _export_metrics(arguments: argparse.Namespace) -> int:
    """Sends metrics.jsonl to a tracker, or writes it as a table."""
    folder: Path = arguments.folder
    tracker: str = arguments.metrics
    run_folder.settings_of(folder)
    if arguments.step is not None:
        raise ConfigError("--step is of a checkpoint, and --metrics sends all steps of a run")
    is_table = tracker == TABLE
    out: Path = arguments.out or (folder / TABLE_FILE if is_table else folder)
    if is_table:
        run_folder.check_unwritten(out)
    run_folder.make_folder(out.absolute().parent if is_table else out)
    texts = [f"--folder={folder}", f"--tracker={tracker}", f"--out={out}"]
    return await _run_export("export-metrics", texts, log_path(folder, "metrics"))


async def predict(arguments: argparse.Namespace) -> int:
    """Runs `slipstream status RUN --if`; raises ConfigError without a run's folder."""
    for option, value in (
        ("--json", arguments.json),
        ("--server-id", arguments.server_id),
        ("--controller", arguments.controller),
    ):
        if value:
            raise ConfigError(f"--if reads the files of a run: leave {option} out")
    if arguments.run is None:
        raise ConfigError("--if reads the files of a run: name its folder, or its name in runs/")
    folder = run_folder.named_folder(arguments.run)
    run_folder.settings_of(folder)
    texts = [f"--folder={folder}", *arguments.changes]
    return await _run_export("predict", texts, log_path(folder, "predict"))


async def _run_export(command: str, texts: Sequence[str], log: Path) -> int:
    """Runs the program of an extension and says what it prints; raises ConfigError for code 2."""
    exporter = program(command)
    log.unlink(missing_ok=True)
    code = await run_program(exporter.name, exporter.module, texts, log, fine=(0, USAGE_ERROR))
    text = log.read_text().strip()
    if code == USAGE_ERROR:
        raise ConfigError(text.rpartition("slipstream: ")[2])
    say(text)
    return 0


async def _export_rollouts(arguments: argparse.Namespace, out: Path) -> int:
    folder: Path = arguments.folder
    run_folder.settings_of(folder)
    run_folder.check_unwritten(out, another="another file by --rollouts")
    run_folder.make_folder(out.absolute().parent)
    first_step, last_step = arguments.steps or (None, None)
    options = {
        "--folder": folder,
        "--out": out,
        "--first-step": first_step,
        "--last-step": last_step,
        "--min-reward": arguments.min_reward,
    }
    texts = [f"{option}={value}" for option, value in options.items() if value is not None]
    return await _run_export("export", texts, log_path(folder, "rollouts"))
