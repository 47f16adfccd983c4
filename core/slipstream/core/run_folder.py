"""Names of files in a run's folder and of metrics that several programs use; functions on logs."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import open_regular

# The settings of the run, all of them.
CONFIG = "config.toml"
# The folder of the journal, its first log, and its folder of batches.
JOURNAL = "journal"
JOURNAL_LOG = "journal.log"
BATCHES = "batches"
# The folder of checkpoints, and the trained model in it.
CHECKPOINTS = "checkpoints"
FINAL_MODEL = "final"
FINAL_ADAPTERS = "final-adapters"
# The file in an exported model that has the digests of its other files.
EXPORT_MANIFEST = "slipstream-manifest.json"
# The manifest of a folder whose files come and go while the run lasts; a line is a change.
GROWING_MANIFEST = "manifest.jsonl"
# The folder of models that `checkpoint.export_every` writes, and the file that names their version.
EXPORTS = "exports"
EXPORT_VERSION = "slipstream-version.json"
# The controller's address, HOST:PORT, as the newest command has it.
ADDRESS = "controller.address"
# The token of a run on loopback, for its owner alone.
TOKEN = "token"
# A row for each step and evaluation, and the facts of a run that has ended.
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
# Some trajectories as text, and the numbers of all groups, both of sampled steps.
SAMPLES = "trajectories.jsonl"
GROUPS = "groups.jsonl"
# Replies of each evaluation round to the first tasks of each evaluation, as text.
HELDOUT = "heldout.jsonl"
# Files of whose bytes the summary of an ended run has digests; logs of the journal may grow later.
RESULT_FILES = (METRICS, SAMPLES, GROUPS, HELDOUT)
# Bytes of such a digest.
FILE_DIGEST_BYTES = 16
# The folder of the answered calls of agents' open episodes.
CALLS = "calls"
# The folder of weights that rollout servers fetched from storage, with a folder for each server.
FETCHED = "fetched"
# The folder of the logs; `log_path` says how one is named.
LOGS = "logs"
# The folder next to the runs' folders that tells Prometheus where their processes show metrics.
TARGETS = ".prometheus"
# The folder of the locks by which processes fill a GPU in turn.
LOCKS = "locks"
# Files that a run writes only after its first journal record.
LEFT_BY_A_RUN = (f"{CHECKPOINTS}/step-*", f"{JOURNAL}/{BATCHES}/step-*.pb", METRICS)


def log_path(folder: Path, name: str) -> Path:
    """Returns the path of the log of the process `name`, given the run's `folder`."""
    return folder / LOGS / f"{name}.log"


def journal_logs(folder: Path) -> list[Path]:
    """Returns the logs in a journal's `folder`, oldest first; each controller start begins one."""
    return [folder / name for name in sorted(_log_names(folder), key=log_number)]


def newest_log_number(folder: Path) -> int:
    """Returns the number of the newest log in a journal's `folder`, or 0 if there is none."""
    return max(map(log_number, _log_names(folder)), default=0)


def journaled_run_id(folder: Path) -> str | None:
    """Returns the run's id in the journal's first record, or None without a whole one."""
    for log in journal_logs(folder / JOURNAL):
        try:
            with open_regular(log) as lines:
                _, _, record = next(lines, b"").partition(b" ")
        except OSError as error:
            raise ConfigError(f"{log} cannot be read: {error.strerror}") from error
        try:
            return str(json.loads(record)["run_id"])
        except (ValueError, LookupError, TypeError):
            continue
    return None


def _log_names(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [name for name in names if name.startswith("journal") and name.endswith(".log")]


def log_number(name: str) -> int:
    """Returns the number in a journal log's name: 1 for `journal.log`, 2 for `journal-2.log`."""
    number = name.removesuffix(".log").partition("-")[2]
    return int(number) if number.isdecimal() else 1


def check_journal_not_lost(folder: Path) -> None:
    """Raises ConfigError if files of a run lie in `folder`, which has no journal record."""
    for pattern in LEFT_BY_A_RUN:
        leftover = next((p for p in folder.glob(pattern) if p.is_dir() or p.stat().st_size), None)
        if leftover is not None:
            raise ConfigError(
                f"{folder / JOURNAL / JOURNAL_LOG} is missing or empty, but the folder holds "
                f"{leftover.relative_to(folder)} of a run: put the journal back from a copy, "
                "remove the folder, or choose another run.name"
            )


def rename_aside(path: Path) -> Path:
    """Renames `path` to the next free name that ends in `.damaged-N`; returns the new path."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(aside):
            return path.rename(aside)
    raise AssertionError


# The metrics of a step that are parts of the trainer's time, in words; other parts have none.
TRAINER_PARTS = {
    "training_s": "training",
    "groups_wait_s": "waiting for groups",
    "publish_s": "publish",
    "checkpoint_s": "checkpoint",
    "export_s": "digests",
}
# The metrics of a step that are the parts of the servers' time.
SERVER_SHARES = ("servers_sampling_share", "servers_paused_share", "servers_idle_share")
# Waits of the next lease in a step, in words; NAME's metric is `lease_wait_NAME_s`.
LEASE_WAITS = {
    "staleness": "a step, by max_staleness",
    "slots": "a free place on a server",
    "server": "a server that serves",
    "environment": "an environment",
    "queue": "room in the queue",
}


def move_finals(folder: Path) -> Iterator[Path]:
    """Renames the models of an earlier end, and yields their new paths; raises ConfigError.

    Whoever copies one while the run goes on would take it for the model of this end.
    """
    for final in (folder / CHECKPOINTS / FINAL_MODEL, folder / CHECKPOINTS / FINAL_ADAPTERS):
        earlier = final.with_name(f"{final.name}-earlier")
        try:
            if final.is_dir():
                if earlier.exists():
                    shutil.rmtree(earlier)
                yield final.rename(earlier)
        except OSError as error:
            raise ConfigError(f"{final} cannot become {earlier}: {error.strerror}") from error
