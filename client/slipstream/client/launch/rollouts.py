"""Carries out `slipstream export`: a checkpoint as a folder, or rollouts as a data set."""

import argparse
from pathlib import Path

from slipstream.client import run_folder
from slipstream.client.launch.launcher import run_export, run_program
from slipstream.client.terminal import say
from slipstream.core.errors import USAGE_ERROR, ConfigError
from slipstream.core.extension import program
from slipstream.core.run_folder import log_path


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
        return await run_export(arguments.folder, arguments.step, arguments.out)
    for option, value in (("--step", arguments.step), ("--out", arguments.out)):
        if value is not None:
            raise ConfigError(
                f"{option} is of a checkpoint and --rollouts of a data set: call export for each"
            )
    return await _export_rollouts(arguments, out)


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
    log = log_path(folder, "rollouts")
    log.unlink(missing_ok=True)
    module = program("export").module
    code = await run_program("rollouts", module, texts, log, fine=(0, USAGE_ERROR))
    text = log.read_text().strip()
    if code == USAGE_ERROR:
        raise ConfigError(text.rpartition("slipstream: ")[2])
    say(text)
    return 0
